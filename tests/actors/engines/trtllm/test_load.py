"""TensorRT-LLM's statistics of iterations as the load of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engines.trtllm.load import RankStatistics
from protocol.messages.engine import RankLoad

AT_REST = RankLoad(slots=8, kv_tokens_max=4096)


def stats(rank: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return the statistics of one iteration, with changed numbers of its batch or its memory."""
    memory = {"usedNumBlocks": 3, "maxNumBlocks": 64, "tokensPerBlock": 32, "cacheHitRate": 0.25}
    batch = {
        "numContextRequests": 1,
        "numGenRequests": 4,
        "numQueuedContextRequests": 2,
        "numQueuedGenRequests": 1,
        "numPausedRequests": 1,
        "numQueuedCtxTokens": 300,
        "numQueuedGenKvTokens": 7,
        "numCtxTokens": 0,
        "numCtxKvTokens": 0,
        "numGenKvTokens": 0,
    }
    found: dict[str, Any] = {"iter": 9, "iterLatencyMS": 20.0}
    found["kvCacheStats"] = {name: changes.get(name, value) for name, value in memory.items()}
    found["inflightBatchingStats"] = {name: changes.get(name, value) for name, value in batch.items()}
    return found if rank is None else {**found, "attentionDpRank": rank}


def loads(ranks: int = 1) -> RankStatistics:
    return RankStatistics(ranks, slots=8, page_size=16, kv_tokens_max=4096)


def test_blocks_become_tokens_and_requests_are_counted() -> None:
    found = loads()
    assert found.note(stats())
    expected = RankLoad(
        running=5,
        slots=8,
        waiting=4,
        waiting_tokens=300,
        kv_tokens_used=96,
        kv_tokens_max=2048,
        hit_rate=0.25,
        throughput=200.0,
    )
    assert found.loads == [expected]


def test_nothing_is_known_before_the_first_answer_nor_at_rest() -> None:
    found = loads(2)
    assert found.loads == [AT_REST, AT_REST]
    found.note(stats(1))
    assert found.loads[0] == AT_REST != found.loads[1]
    found.rest(0)
    assert found.loads[1] != AT_REST
    found.rest(1)
    assert found.loads == [AT_REST, AT_REST]


def test_the_last_statistics_of_each_rank_count() -> None:
    found = loads(2)
    for rank, used in ((0, 1), (1, 2), (0, 5)):
        found.note(stats(rank, usedNumBlocks=used, numCtxKvTokens=used, numGenKvTokens=100, numCtxTokens=20))
    assert [each.kv_tokens_used for each in found.loads] == [160, 122], "a rank but the first has no memory of its own"
    assert [each.kv_tokens_max for each in found.loads] == [2048, 4096]
    assert [each.hit_rate for each in found.loads] == [0.25, 0.0]
    assert not found.note(stats(2)), "the engine has no such rank"


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"kvCacheStats": None, "inflightBatchingStats": []},
        {"kvCacheStats": {"usedNumBlocks": -1, "maxNumBlocks": "64"}, "iterLatencyMS": 0},
        {"kvCacheStats": {"cacheHitRate": float("nan")}, "iterLatencyMS": float("nan"), "attentionDpRank": -3},
    ],
)
def test_a_number_that_is_missing_or_cannot_be_counts_as_0(odd: dict[str, Any]) -> None:
    found = loads()
    assert found.note(odd)
    assert found.loads == [AT_REST]


def test_an_older_version_does_not_name_the_tokens_of_a_block() -> None:
    found = loads()
    found.note(stats(tokensPerBlock=None, cacheHitRate=3.0))
    assert (found.loads[0].kv_tokens_used, found.loads[0].hit_rate) == (48, 1.0)
