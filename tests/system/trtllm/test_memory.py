"""The release of memory on TensorRT-LLM's kind: who offers it, the blocks, the signs of life, and calls that fail."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve

from protocol.errors import EngineDied, EngineRefused, InternalError, NotReady, RequestError, Unsupported
from protocol.messages.kv_events import BlockChange, BlockEvents
from protocol.messages.leaving import MemoryTag
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from tests.contracts.engine import complete, request, serves_on
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import Fault
from tests.rig.trtllm_engines import SPEC, trtllm_engine

pytestmark = pytest.mark.realtime

RELEASES = evolve(SPEC, releases_memory=True)
KV_CACHE, WEIGHTS = (MemoryTag.KV_CACHE,), (MemoryTag.WEIGHTS,)


async def test_only_an_engine_that_is_configured_so_offers_it() -> None:
    async with trtllm_engine() as engines:
        engine = engines.current
        assert engine is not None
        assert not {"release-memory", "resume-memory"} & {*engine.info.operations}
        with pytest.raises(Unsupported, match="release-memory"):
            await engine.operate(ReleaseMemory(tags=KV_CACHE))


async def test_weights_of_another_process_are_not_released() -> None:
    async with trtllm_engine(evolve(RELEASES, settings={"load_format": "gms"})) as engines:
        engine = engines.current
        assert engine is not None
        with pytest.raises(Unsupported, match="leave out this tag"):
            await engine.operate(ReleaseMemory(tags=WEIGHTS))
        await engine.operate(ReleaseMemory(tags=KV_CACHE))
        await engine.operate(ResumeMemory())
        await serves_on(engine)


async def test_a_release_of_the_kv_cache_and_no_other_forgets_its_blocks() -> None:
    async with trtllm_engine(evolve(RELEASES, publishes=True)) as engines:
        engine = engines.current
        assert engine is not None
        changes = list[BlockChange]()

        def receive(events: BlockEvents) -> None:
            changes.extend(each.change for each in events.events)

        async def wait_for(change: BlockChange) -> None:
            with trio.fail_after(10):
                while change not in changes:  # noqa: ASYNC110  # events are pushed
                    await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.watch_blocks, receive)
            await complete(engine, request(engine, prompt=40))
            await wait_for(BlockChange.STORED)
            await engine.operate(ReleaseMemory(tags=WEIGHTS))
            await engine.operate(ResumeMemory())
            assert BlockChange.CLEARED not in changes
            await engine.operate(ReleaseMemory(tags=KV_CACHE))
            await wait_for(BlockChange.CLEARED)
            nursery.cancel_scope.cancel(reason="all has been seen")


async def test_a_request_in_the_middle_of_a_release_is_refused_and_does_not_reach_the_engine() -> None:
    async with trtllm_engine(RELEASES) as engines:
        engine = engines.current
        assert engine is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.operate, ReleaseMemory(tags=WEIGHTS))
            await trio.sleep(0.005)
            with pytest.raises(NotReady, match="released"):
                await complete(engine, request(engine))
        await engine.operate(ResumeMemory())
        await serves_on(engine)


async def test_an_engine_whose_memory_is_released_does_not_count_as_frozen() -> None:
    async with trtllm_engine(RELEASES, silent_s=0.5) as engines:
        engine = engines.current
        assert engine is not None
        await engine.operate(ReleaseMemory(tags=KV_CACHE))
        await trio.sleep(1.5)
        await engine.operate(ResumeMemory())
        await serves_on(engine)


async def test_a_call_that_the_engine_does_not_have_is_refused_and_the_engine_serves_on() -> None:
    async with trtllm_engine(RELEASES, ESPALIER_FAKE_TRTLLM_FAULT=Fault.SLEEP_UNSUPPORTED.name) as engines:
        engine = engines.current
        assert engine is not None
        with pytest.raises(EngineRefused, match="does not support collective RPC"):
            await engine.operate(ReleaseMemory(tags=KV_CACHE))
        await serves_on(engine)


@pytest.mark.parametrize("fault", [Fault.SLEEP_FAILS, Fault.SLEEP_HALF, Fault.WAKEUP_FAILS])
async def test_a_call_that_fails_ends_the_host(fault: Fault) -> None:
    dies = pytest.RaisesGroup(
        pytest.RaisesExc(EngineDied, match="failed: (Runtime|Value)Error: CUDA driver error: out of memory"),
        allow_unwrapped=True,
        flatten_subgroups=True,
    )
    with trio.fail_after(60), dies:
        async with trtllm_engine(RELEASES, ESPALIER_FAKE_TRTLLM_FAULT=fault.name) as engines:
            engine = engines.current
            assert engine is not None
            await serves_on(engine)
            if fault is Fault.WAKEUP_FAILS:
                await engine.operate(ReleaseMemory(tags=KV_CACHE))
            with pytest.raises(RequestError) as failed:
                await engine.operate(ResumeMemory() if fault is Fault.WAKEUP_FAILS else ReleaseMemory(tags=KV_CACHE))
            assert isinstance(failed.value, InternalError)
            await trio.sleep_forever()
