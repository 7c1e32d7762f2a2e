"""A test in which the product keeps the event loop for too long fails, whatever it is about; the test's own tasks may."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import trio

from supervisor.gateway.requests import RequestRunner
from supervisor.node.node import send_heartbeats
from tests.rig.turn_cost import COST_MAX, TurnTooLong
from tests.rig.turns import TURN_CPU_MAX_S, cpu_watched
from tests.system.simulator.seed import run_seed

pytestmark = pytest.mark.turns_exempt("turns that take too long are what it is about")


def computes(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def run(pulse: Callable[[], None]) -> list[str]:
    """Run a task of the product that calls `pulse` once a turn, under watch, and return what is told of it."""

    async def main() -> None:
        with trio.move_on_after(0.05):
            await send_heartbeats(pulse, 0.05)

    async def product() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_heartbeats, pulse, 0.05)
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()

    with cpu_watched() as exceeded:
        trio.run(main)
        assert exceeded == []  # it ran in the test's own task
        trio.run(product)
    return exceeded


def test_a_turn_that_computes_for_too_long_is_reported_with_its_function() -> None:
    exceeded = run(lambda: computes(2 * TURN_CPU_MAX_S))
    assert exceeded
    assert exceeded[0].startswith("node.send_heartbeats took 0.")


def test_a_short_turn_and_one_that_waits_for_the_processor_are_not_reported() -> None:
    assert run(lambda: computes(TURN_CPU_MAX_S / 10)) == []
    assert run(lambda: time.sleep(2 * TURN_CPU_MAX_S)) == []


# In the simulator, where calls are counted --------------------------------------------------------


PLANTED = """
def find(self, model):
    for _ in range(times):
        len("")
    return plain(self, model)
"""


def costing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Run a seed that is counted, in which each request calls so many functions in one turn, and not the simulator's."""
    planted = {"times": times, "plain": RequestRunner.find}
    exec(compile(PLANTED, "planted", "exec"), planted)
    monkeypatch.setattr(RequestRunner, "find", planted["find"])
    run_seed.__wrapped__(0)


def test_a_seed_with_a_turn_that_does_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TurnTooLong, match=r"server\.serve_stream"):
        costing(monkeypatch, COST_MAX)


def test_a_seed_whose_turns_do_little_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    costing(monkeypatch, COST_MAX // 10)
