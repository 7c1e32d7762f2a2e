"""A worker of SMG that computes nothing: its answers, and the events of its blocks. Its packages are stood in for."""

from __future__ import annotations

import sys
from importlib import import_module, reload
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Messages(ModuleType):
    """Generated messages: of any name, with the fields that they are given."""

    def __getattr__(self, name: str) -> type[SimpleNamespace]:
        return SimpleNamespace


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    generated = "smg_grpc_proto.generated"
    for name in ("grpc", "smg_grpc_proto", generated):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("common_pb2", "sglang_scheduler_pb2"):
        monkeypatch.setattr(sys.modules[generated], name, Messages(name), raising=False)
    return reload(import_module("bench.turns.smg_worker"))


def asked(tokens: int, wanted: int = 2, *, stream: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        request_id="r",
        stream=stream,
        tokenized=SimpleNamespace(input_ids=range(tokens)),
        sampling_params=SimpleNamespace(max_new_tokens=wanted),
    )


def test_an_answer_is_a_chunk_for_each_token_and_the_whole(worker: Any) -> None:
    *chunks, last = worker.generate(worker.Cache(), asked(40), None)
    tokens = [token for each in chunks for token in each.chunk["token_ids"]]
    assert [each.chunk["completion_tokens"] for each in chunks] == [1, 2]
    assert (last.complete["output_ids"], last.complete["finish_reason"]) == (tokens, "length")
    assert last.complete["prompt_tokens"] == 40
    assert set(tokens) <= set(worker.TOKENS)
    assert len(list(worker.generate(worker.Cache(), asked(40, stream=False), None))) == 1


def test_a_prompt_finds_the_full_blocks_of_one_that_it_continues(worker: Any) -> None:
    cache = worker.Cache()
    assert [cache.store(range(size)) for size in (40, 40, 70, 10)] == [0, 32, 32, 0]
    assert cache.store([9, *range(1, 70)]) == 0


def test_only_new_blocks_are_told_behind_the_one_before_them(worker: Any) -> None:
    cache = worker.Cache()
    for size in (40, 40, 70):
        cache.store(range(size))
    first, second = (batch.events[0].stored for batch in islice(cache.follow(), 2))
    assert [next(iter(block.token_ids)) for block in first.blocks] == [0, 16]
    assert [next(iter(block.token_ids)) for block in second.blocks] == [32, 48]
    assert (first.parent_block_hash, second.parent_block_hash) == (None, first.blocks[-1].block_hash)
