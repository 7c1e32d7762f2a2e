"""TensorRT-LLM's kind with two ranks: each is asked as routed, with a load and blocks of its own, and all are one engine."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve

from actors.engines.port import Engine
from actors.routing.policies.kv.index import PrefixIndex
from protocol.block_hashes import block_hashes
from protocol.errors import BadRequest, Overloaded
from protocol.messages.engine import EngineLoad, RankLoad
from protocol.messages.generation import Generate, Sampling
from protocol.messages.kv_events import BlockEvents
from protocol.messages.leaving import MemoryTag
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from tests.contracts.engine import complete, new_id
from tests.rig.trtllm_engines import SPEC, trtllm_engine

pytestmark = pytest.mark.realtime

RANKS = evolve(SPEC, tensor_parallel=2, data_parallel=2, publishes=True, releases_memory=True)
PROMPT = TokenIds.of([5 + place % 200 for place in range(64)])
AT_REST = RankLoad(slots=8, kv_tokens_max=8192)


def of(rank: int, tokens_max: int = 8) -> Generate:
    return Generate(new_id(), PROMPT, Sampling(tokens_max, temperature=0.0, ignore_eos=True), rank=rank)


async def ask(engine: Engine, rank: int) -> tuple[int, list[int]]:
    """Return the cached tokens of an answer of a rank, and its tokens."""
    ids, finished = await complete(engine, of(rank))
    return finished.usage.cached_tokens, ids


async def holds(index: PrefixIndex, *blocks: int) -> None:
    """Wait until the ranks have told of so many blocks of the prompt."""
    found: list[int] = []
    with trio.move_on_after(10):
        while (found := blocks_of(index)) != [*blocks]:  # noqa: ASYNC110  # events are pushed
            await trio.sleep(0.01)
    assert found == [*blocks]


def blocks_of(index: PrefixIndex) -> list[int]:
    found = index.match(block_hashes(PROMPT.tolist(), RANKS.page_size))
    return [found.blocks("e", rank) for rank in range(RANKS.data_parallel)]


async def test_each_rank_answers_what_is_asked_of_it_with_blocks_of_its_own() -> None:
    index = PrefixIndex()

    def apply(events: BlockEvents) -> None:
        if events.reset:
            index.forget("e")
        index.apply("e", events.events)

    async with trtllm_engine() as engines:
        assert engines.current is not None
        _, expected = await ask(engines.current, 0)
    async with trtllm_engine(RANKS) as engines, trio.open_nursery() as nursery:
        engine = engines.current
        assert engine is not None
        assert (engine.info.data_parallel, engine.info.running_max, engine.info.kv_tokens_max) == (2, 8, 8192)
        nursery.start_soon(engine.watch_blocks, apply)
        assert await ask(engine, 1) == (0, expected)
        assert await ask(engine, 1) == (48, expected)
        await holds(index, 0, 4)
        assert await ask(engine, 0) == (0, expected)  # the other rank has it, not this one
        await holds(index, 4, 4)
        assert await ask(engine, 0) == await ask(engine, 1) == (48, expected)
        with pytest.raises(BadRequest, match="rank must be from 0 to 1"):
            await ask(engine, 2)
        await engine.operate(FlushCache())
        await holds(index, 0, 0)
        assert await ask(engine, 1) == (0, expected)
        await holds(index, 0, 4)
        await engine.operate(ReleaseMemory(tags=(MemoryTag.KV_CACHE,)))
        await holds(index, 0, 0)
        await engine.operate(ResumeMemory())
        assert await ask(engine, 1) == (0, expected)
        nursery.cancel_scope.cancel(reason="all has been seen")


async def test_each_rank_has_slots_memory_and_a_load_of_its_own() -> None:
    loads = list[EngineLoad]()
    async with trtllm_engine(RANKS) as engines, trio.open_nursery() as nursery:
        engine = engines.current
        assert engine is not None
        nursery.start_soon(engine.watch_load, loads.append)
        long = [of(1, 4000) for _ in range(3)]  # more than the memory of a rank has room for
        answers = [engine.submit(wanted) for wanted in long]
        await anext(answers[0])
        await anext(answers[1])
        await trio.sleep(0.5)
        load = await engine.load()
        assert [(each.running > 0, each.kv_tokens_used > 0) for each in load.by_rank] == [(False, False), (True, True)]
        assert [each.kv_tokens_max for each in load.by_rank] == [8192, 8192]
        assert [each.slots for each in loads[-1].by_rank] == [8, 8]
        assert loads[-1].by_rank[0].kv_tokens_used == 0 < loads[-1].by_rank[1].kv_tokens_used
        await ask(engine, 0)  # a full rank delays no other
        with pytest.raises(Overloaded):
            await engine.operate(FlushCache())
        for wanted in long:
            engine.abort(wanted.id)
            await engine.wait_released(wanted.id)
        with trio.fail_after(10):
            while (load := await engine.load()).by_rank != (AT_REST, AT_REST):  # noqa: ASYNC110  # it can only be asked
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel(reason="all has been seen")
