"""Tokens go one way where nothing but their text matters, and another where more does: clients cannot tell which.

The simulator repeats a seed exactly, ids and times included, so all bytes for all clients can be compared. Faults,
cancellations, slow readers and answers that need the general way are among what the seeds draw.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from actors.kit.fast_path import FastPath
from actors.text.detokenizer import IncrementalDetokenizer
from protocol.link.peer import Peer
from protocol.messages.text import Text
from supervisor.gateway.http import response
from supervisor.gateway.outbox import Outbox
from tests.system.simulator.cluster_seed import run_cluster_seed
from tests.system.simulator.seed import run_seed

SEEDS = (101, 110, 115)  # with many tokens of either way
CLUSTER_SEEDS = (3, 5, 13)


def written(
    seed: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[int], str] = run_seed.__wrapped__
) -> tuple[list[bytes], str]:
    """Return all that a gateway writes for its clients under a seed, and the trace of the seed."""
    data_written: list[bytes] = []
    put = Outbox.put

    def record(self: Outbox, data: bytes) -> None:
        data_written.append(data)
        put(self, data)

    with monkeypatch.context() as patches:
        patches.setattr(Outbox, "put", record)
        trace = run(seed)
    return data_written, trace


@pytest.mark.parametrize("seed", SEEDS)
def test_clients_get_the_same_bytes_at_the_same_times_either_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = written(seed, monkeypatch)
    with monkeypatch.context() as patches:
        patches.setattr(FastPath, "take", refuse)
        assert written(seed, monkeypatch) == usual
        patches.setattr(IncrementalDetokenizer, "feed_whole", lambda *_: None)
        patches.setattr(response, "CHUNKED", b"never in a head")
        assert written(seed, monkeypatch) == usual


@pytest.mark.parametrize("seed", CLUSTER_SEEDS)
def test_clients_of_a_cluster_get_the_same_bytes_whether_or_not_tokens_skip_stages(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = written(seed, monkeypatch, run_cluster_seed.__wrapped__)
    with monkeypatch.context() as patches:
        patches.setattr(FastPath, "take", refuse)
        assert written(seed, monkeypatch, run_cluster_seed.__wrapped__) == usual


def refuse(*_: object) -> bool:
    """Let every token go the general way."""
    return False


def test_these_seeds_have_tokens_that_go_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    feed_whole, take = IncrementalDetokenizer.feed_whole, FastPath.take

    def record(self: IncrementalDetokenizer, token: int) -> Text | None:
        text = feed_whole(self, token)
        ways.append("general" if text is None else "by the table")
        return text

    def record_taken(self: FastPath[Text], token: int, now: float) -> bool:
        taken = take(self, token, now)
        if taken:
            ways.append("fast")
        return taken

    monkeypatch.setattr(IncrementalDetokenizer, "feed_whole", record)
    monkeypatch.setattr(FastPath, "take", record_taken)
    changes = 0
    for seed in SEEDS:
        run_seed.__wrapped__(seed)
        changes += sum(before != after for before, after in pairwise(ways))
    assert ways.count("fast") > 100
    assert ways.count("general") > 50
    assert changes > 50, "one way takes over from the other in the middle of answers"


@pytest.mark.parametrize("seed", CLUSTER_SEEDS)
def test_a_cluster_whose_nodes_take_no_steps_of_tokens_serves_as_well(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "takes_steps", lambda *_: False)
    run_cluster_seed.__wrapped__(seed)
