"""Injected faults of a simulated engine: each has its effect, and ends when it is withdrawn."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import Faults
from protocol.errors import AskerLeft, EngineDied, EngineLost, EngineRefused
from protocol.messages.engine import EngineLoad
from tests.rig.simulated_engines import generate, running, spec, timed
from tests.rig.tasks import expect_error


async def test_a_slow_engine_takes_longer_from_its_next_step_on(autojump_clock: MockClock) -> None:
    async with running(spec(faults=Faults(slow=2.0))) as engine, trio.open_nursery() as nursery:
        times: list[float] = []
        nursery.start_soon(timed, engine.submit(generate("a", tokens_max=4)), times)
        await trio.sleep(3)
        engine.inject(Faults())
    assert times == [2, 4, 5, 6]


async def test_a_stuck_engine_keeps_what_is_aborted_until_it_heals(autojump_clock: MockClock) -> None:
    async with running(spec(slots=1, faults=Faults(stuck=1.0))) as engine:
        stuck = engine.submit(generate("a", tokens_max=9))
        waits, leaves = engine.submit(generate("b", tokens_max=1)), engine.submit(generate("c"))
        await trio.sleep(1.5)
        engine.abort("a")
        engine.abort("c")
        with trio.move_on_after(100) as patience:
            await engine.wait_released("a")
        assert patience.cancelled_caught
        assert leaves.over.is_set(), "who only waits holds nothing that could be stuck"
        assert await engine.load() == EngineLoad(1, 1, 4)
        engine.inject(Faults())
        await engine.wait_released("a")
        assert trio.current_time() == 101.5
        with pytest.raises(AskerLeft):
            await stuck.result()
        assert await timed(waits) == [102.5]


async def test_an_engine_may_find_a_request_wrong_when_it_computes_it(autojump_clock: MockClock) -> None:
    async with running(spec(faults=Faults(refuse=1.0))) as engine:
        refused = engine.submit(generate("a"))
        with pytest.raises(EngineRefused):
            await refused.result()
        assert trio.current_time() == 1
        assert await engine.load() == EngineLoad(0, 0, 0)
        engine.inject(Faults())
        assert len(await timed(engine.submit(generate("b")))) == 3


async def test_nothing_happens_during_a_stall_and_everything_goes_on_after_it(autojump_clock: MockClock) -> None:
    async with running() as engine, trio.open_nursery() as nursery:
        times: list[float] = []
        nursery.start_soon(timed, engine.submit(generate("a", tokens_max=3)), times)
        engine.submit(generate("b", tokens_max=9))
        await trio.sleep(1.5)
        engine.stall(10)
        engine.abort("b")
        await engine.wait_released("b")
        assert trio.current_time() == 11.5
    assert times == [1, 11.5, 12.5]


async def test_a_crash_fails_every_answer_and_ends_the_actor(autojump_clock: MockClock) -> None:
    engine = SimulatedEngine(spec(), random.Random(0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, EngineDied, engine.run)
        answers = [engine.submit(generate(str(number), tokens_max=9)) for number in range(6)]
        whole = engine.submit(generate("whole", tokens_max=1))
        await trio.sleep(2.5)
        engine.crash()
        for answer in answers:
            with pytest.raises(EngineLost):
                await answer.result()
        await engine.wait_lost()
        await engine.wait_released("0")
        assert trio.current_time() == 2.5
    with pytest.raises(EngineLost):
        engine.submit(generate("later"))
    assert whole.over.is_set()
