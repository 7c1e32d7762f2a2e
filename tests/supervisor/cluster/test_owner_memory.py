"""A prompt that waits for KV memory which only its own owner has delays no prompt of others."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
from attrs import evolve

from protocol.cluster import Leg
from protocol.messages import EngineInfo
from supervisor.cluster.directory import Directory
from supervisor.cluster.owner_memory import OwnerMemory
from tests.rig.fake_engine import generate
from tests.rig.nodes import add_worker

INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)


async def test_a_prompt_that_waits_for_the_memory_of_its_own_owner_delays_no_prompt_of_others() -> None:
    worker = add_worker(Directory("here"), slots=8, inbox_size=8)
    hog, large, small = (
        evolve(generate(), id=number * 32, owner=owner, tokens=[1] * prompt)
        for number, owner, prompt in (("1", "a", 500), ("2", "a", 300), ("3", "b", 20))
    )
    with worker.engine.publish(SimpleNamespace(info=INFO)):
        async with AsyncExitStack() as asking:
            await asking.enter_async_context(worker.ask(hog, 9))
            await asking.enter_async_context(worker.ask(evolve(small, id="4" * 32), 9))
            assert worker.load.pending == 520
            await asking.enter_async_context(worker.ask(large, 9))
            assert (worker.load.pending, worker.load.busy) == (520, 3)
            await asking.enter_async_context(worker.ask(small, 9))
            assert worker.load.pending == 540
            await asking.enter_async_context(worker.ask(evolve(large, id="5" * 32, owner=""), 9))
            assert worker.load.pending == 840, "whose memory it lacks is not known"
    assert (worker.load.pending, worker.memory.held.tokens) == (0, 0)


@pytest.mark.parametrize(("others", "waits"), [(0, True), (300, True), (400, False)])
def test_what_other_nodes_may_need_is_nobodys_own(others: int, waits: bool) -> None:
    memory = OwnerMemory()
    hog, large = (evolve(generate(), owner="a", tokens=[1] * prompt) for prompt in (500, 300))
    with memory.added(hog, Leg.BOTH, INFO, others) as hog_waits, memory.added(large, Leg.BOTH, INFO, others) as found:
        assert (hog_waits, found) == (False, waits)
    assert memory.held.tokens == 0


def test_a_worker_whose_memory_is_not_known_has_none_that_a_request_waits_for() -> None:
    memory = OwnerMemory()
    hog = evolve(generate(), owner="a", tokens=[1] * 500)
    with memory.added(hog, Leg.BOTH, None, 0) as first, memory.added(hog, Leg.BOTH, None, 0) as second:
        assert (first, second) == (False, False)
