"""Admission: requests are admitted, queued, displaced and refused in the right order and at exact times."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from attrs import Factory, define
from hypothesis import given
from hypothesis import strategies as st
from trio.lowlevel import Task
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import Draining, NotReady, Overloaded
from supervisor.gateway.admission import BEGIN_MAX, AdmissionGate
from tests.system.simulator import simulate

Log = list[tuple[float, str, str]]


def make_gate(requests_max: int = 2, admit_s: float = 5.0, waiting_max: int = 2) -> AdmissionGate:
    return AdmissionGate(requests_max, admit_s, waiting_max, lambda: None)


async def hold(gate: AdmissionGate, for_s: int, log: Log, name: str, priority: int = 0) -> None:
    try:
        async with gate.admitted(priority):
            log.append((trio.current_time(), name, "in"))
            await trio.sleep(for_s)
    except (Overloaded, Draining, NotReady) as error:
        log.append((trio.current_time(), name, error.code))


async def come(
    nursery: trio.Nursery, gate: AdmissionGate, log: Log, name: str, priority: int = 0, for_s: int = 1
) -> None:
    """Start a request, and wait until it is inside, refused or in the queue."""
    nursery.start_soon(hold, gate, for_s, log, name, priority, name=name)
    await wait_all_tasks_blocked()


async def run(gate: AdmissionGate, *plans: tuple[int, int, str], log: Log | None = None) -> Log:
    """Start each `(at_s, for_s, name)` on time, and return what became of all, as `(time, name, "in" or error code)`."""
    log = [] if log is None else log
    async with trio.open_nursery() as nursery:
        for at_s, for_s, name in plans:
            await trio.sleep(at_s - trio.current_time())
            await come(nursery, gate, log, name, for_s=for_s)
    assert (gate.inside, gate.waiting) == (0, 0)
    return log


async def test_a_request_that_waits_longer_than_admit_s_is_refused(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    log = await run(gate, (0, 9, "a"), (1, 1, "b"))
    assert log == [(0, "a", "in"), (6, "b", "overloaded")]


async def test_a_new_request_does_not_overtake_those_that_wait(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, waiting_max=8)
    log: Log = []

    async def again_and_again() -> None:
        for turn in range(3):
            await hold(gate, 1, log, f"a{turn}")  # comes back in the very turn in which it leaves

    async with trio.open_nursery() as nursery:
        nursery.start_soon(again_and_again)
        await trio.sleep(0.5)
        await come(nursery, gate, log, "b")
        nursery.start_soon(hold, gate, 1, log, "c")
    assert [name for _, name, _ in log] == ["a0", "b", "c", "a1", "a2"]
    assert [at for at, _, _ in log] == [0, 1, 2, 3, 4]


async def test_a_drain_refuses_the_requests_that_wait_and_all_later_ones(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    log: Log = []

    async def drain() -> None:
        await trio.sleep(2)
        gate.drain()
        await gate.wait_empty()
        log.append((trio.current_time(), "gate", "empty"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        await run(gate, (0, 4, "a"), (1, 1, "b"), (3, 1, "c"), log=log)
    assert log == [(0, "a", "in"), (2, "b", "draining"), (3, "c", "draining"), (4, "gate", "empty")]


async def test_an_unready_server_admits_no_request_and_gives_the_reason(autojump_clock: MockClock) -> None:
    gate = make_gate()
    gate.unready = lambda: "engine a is still starting"
    with pytest.raises(NotReady, match="engine a is still starting"):
        async with gate.admitted():
            pass
    gate.unready = lambda: None
    async with gate.admitted():
        assert gate.inside == 1


async def test_a_request_that_waits_is_refused_if_the_server_becomes_unready(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    log: Log = []

    async def lose() -> None:
        await trio.sleep(2)
        gate.unready = lambda: "gone"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        await run(gate, (0, 3, "a"), (1, 1, "b"), log=log)
    assert log == [(0, "a", "in"), (3, "b", "not_ready")]


async def test_an_error_inside_frees_the_place(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    with pytest.raises(KeyError):
        async with gate.admitted():
            raise KeyError
    assert gate.inside == 0


# Priorities ------------------------------------------------------------------------------------


async def test_a_place_that_was_given_to_a_cancelled_request_goes_to_the_next(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=8)
    log, scope = Log(), trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await hold(gate, 1, log, "b", 9)

    async with trio.open_nursery() as nursery:
        async with gate.admitted():
            nursery.start_soon(cancelled)
            await wait_all_tasks_blocked()
            await come(nursery, gate, log, "c")
            scope.cancel()
        assert gate.inside == 1  # given in this very turn, to one who will not come
    assert log == [(0, "c", "in")]
    assert (gate.inside, gate.waiting) == (0, 0)


# Displacing ------------------------------------------------------------------------------------


async def test_a_displaced_request_gets_the_reason_and_a_retry_after(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
    async with trio.open_nursery() as nursery, gate.admitted():
        nursery.start_soon(hold, gate, 1, [], "b", 1)
        with pytest.raises(Overloaded, match="one with a higher priority displaced this one") as refused:
            async with gate.admitted(0):
                pytest.fail("there was no place")
    assert refused.value.retry_after_s == 1


class DrainsAfterB(trio.abc.Instrument):
    """Drains a gate just after the second step of the task called `b`, in which it comes to the gate."""

    def __init__(self, gate: AdmissionGate) -> None:
        self.gate, self.steps = gate, 0

    def after_task_step(self, task: Task) -> None:
        self.steps += task.name == "b"
        if task.name == "b" and self.steps == 2:
            self.gate.drain()


async def test_a_request_that_is_displaced_in_the_turn_of_a_drain_is_refused_as_draining(
    autojump_clock: MockClock,
) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
    log: Log = []
    async with trio.open_nursery() as nursery:
        await come(nursery, gate, log, "first", for_s=10)
        await come(nursery, gate, log, "a")
        drains = DrainsAfterB(gate)
        trio.lowlevel.add_instrument(drains)
        await come(nursery, gate, log, "b", 9)
        trio.lowlevel.remove_instrument(drains)  # raises if it has failed
        await come(nursery, gate, log, "c", 10)
        assert (gate.inside, gate.waiting) == (1, 0)
        await gate.wait_empty()
        assert trio.current_time() == 10
    assert log[0] == (0.0, "first", "in")
    assert sorted(log[1:]) == [(0, name, "draining") for name in "abc"]


# Any sequence of events ------------------------------------------------------------------------


@define
class Crowd:
    """Requests that come to a gate and are cancelled, by number, and their states."""

    gate: AdmissionGate
    nursery: trio.Nursery
    inside: list[int] = Factory(list)
    refused: list[int] = Factory(list)
    over: list[int] = Factory(list)
    scopes: list[trio.CancelScope] = Factory(list)
    priorities: list[int] = Factory(list)

    def come(self, priority: int) -> None:
        self.scopes.append(trio.CancelScope())
        self.priorities.append(priority)
        self.nursery.start_soon(self._stay, len(self.scopes) - 1, priority)

    def give_up(self, at: int) -> None:
        """Cancel one of the requests, be it inside, in the queue or on its way."""
        alive = [number for number in range(len(self.scopes)) if number not in self.over]
        if alive:
            self.scopes[alive[at % len(alive)]].cancel()

    async def _stay(self, number: int, priority: int) -> None:
        try:
            with self.scopes[number]:
                async with self.gate.admitted(priority):
                    self.inside.append(number)
                    await trio.sleep_forever()
        except Overloaded:
            self.refused.append(number)
        self.over.append(number)

    @property
    def living(self) -> list[Any]:
        return [number for number in range(len(self.scopes)) if number not in self.over]

    @property
    def line(self) -> list[Any]:
        return [number for number in self.living if number not in self.inside]


@define
class Model:
    """The behaviour that a gate must have, for one request after the other."""

    requests_max: int
    waiting_max: int
    inside: list[int] = Factory(list)
    refused: list[int] = Factory(list)
    line: list[tuple[int, int]] = Factory(list)  # the smallest goes first

    def come(self, number: int, priority: int) -> None:
        self.line.append((-priority, number))
        self._move()
        if len(self.line) > self.waiting_max:
            self.line.sort()
            self.refused.append(self.line.pop()[1])

    def give_up(self, number: int) -> None:
        self.line = [each for each in self.line if each[1] != number]
        if number in self.inside:
            self.inside.remove(number)
        self._move()

    def _move(self) -> None:
        while self.line and len(self.inside) < self.requests_max:
            self.line.sort()
            self.inside.append(self.line.pop(0)[1])


SMALL = st.integers(1, 3)
EVENTS = st.lists(st.tuples(st.sampled_from(["come", "come", "give up"]), st.integers(-2, 2)), max_size=25)


@given(requests_max=SMALL, waiting_max=SMALL, events=EVENTS)
def test_a_gate_behaves_as_its_model_for_any_sequence_of_requests(
    requests_max: int, waiting_max: int, events: list[tuple[str, int]]
) -> None:
    async def main() -> None:
        gate, model = AdmissionGate(requests_max, 60.0, waiting_max, lambda: None), Model(requests_max, waiting_max)
        async with trio.open_nursery() as nursery:
            crowd = Crowd(gate, nursery)
            for what, value in events:
                if what == "come":
                    crowd.come(value)
                    model.come(len(crowd.scopes) - 1, value)
                elif crowd.living:
                    model.give_up(crowd.living[value % len(crowd.living)])
                    crowd.give_up(value)
                await wait_all_tasks_blocked()
                assert crowd.refused == model.refused
                assert sorted(crowd.line) == sorted(number for _, number in model.line)
                assert (gate.inside, gate.waiting) == (len(model.inside), len(model.line))
            nursery.cancel_scope.cancel()
        assert (gate.inside, gate.waiting) == (0, 0)

    trio.run(main)


class Watching(trio.abc.Instrument):
    """Notes after each step of any task whether a gate exceeds a limit, or keeps a place empty."""

    def __init__(self, gate: AdmissionGate) -> None:
        self.gate, self.seen = gate, set[tuple[bool, bool, bool]]()

    def after_task_step(self, task: Task) -> None:
        gate = self.gate
        too_full = gate.inside > gate.requests_max, gate.waiting > gate.waiting_max
        self.seen.add((*too_full, gate.waiting > 0 and gate.inside < gate.requests_max))


@pytest.mark.parametrize("seed", range(30))
def test_within_one_turn_no_request_is_lost_and_no_limit_is_exceeded(seed: int) -> None:
    async def main(rng: random.Random) -> None:
        gate = AdmissionGate(2, 1000.0, 3, lambda: None)
        watching = Watching(gate)
        trio.lowlevel.add_instrument(watching)
        async with trio.open_nursery() as nursery:
            crowd = Crowd(gate, nursery)
            for _ in range(30):
                for _ in range(rng.randrange(8)):
                    crowd.come(rng.randrange(3)) if rng.random() < 0.6 else crowd.give_up(rng.randrange(99))
                    for _ in range(rng.randrange(3)):
                        await trio.lowlevel.checkpoint()
                await wait_all_tasks_blocked()
                assert gate.inside + gate.waiting == len(crowd.living)
            for scope in crowd.scopes:
                scope.cancel()
        assert watching.seen == {(False, False, False)}
        assert (gate.inside, gate.waiting) == (0, 0)
        assert sorted(crowd.over) == list(range(len(crowd.scopes)))
        assert crowd.refused

    simulate(main, seed)


class Beginnings(trio.abc.Instrument):
    """Counts the requests that begin in each pass of the event loop."""

    def __init__(self) -> None:
        self.begun = [0]

    def after_io_wait(self, timeout: float) -> None:
        self.begun.append(0)


async def test_requests_that_are_admitted_at_once_begin_a_few_at_a_time(
    autojump_clock: MockClock,
) -> None:
    gate = AdmissionGate(200, 5.0, 200, lambda: None)
    passes, order, release = Beginnings(), list[int](), trio.Event()

    async def enter(number: int) -> None:
        async with gate.admitted():
            passes.begun[-1] += 1
            order.append(number)
            await release.wait()

    trio.lowlevel.add_instrument(passes)
    async with trio.open_nursery() as nursery:
        for number in range(128):
            nursery.start_soon(enter, number)
        for after in range(1, 6):  # some leave while they wait for their turn
            nursery.start_soon(_leave, gate, after)
        await wait_all_tasks_blocked()
        assert len(order) == 128
        assert max(passes.begun) == BEGIN_MAX
        assert gate.inside == 128
        release.set()
    trio.lowlevel.remove_instrument(passes)
    assert gate.inside == 0
    async with gate.admitted():  # nobody's turn was lost
        assert gate.inside == 1


async def _leave(gate: AdmissionGate, after: int) -> None:
    """Be cancelled after so many passes of the event loop, in which the turn does not come."""
    async with trio.open_nursery() as nursery:

        async def enter() -> None:
            async with gate.admitted():
                pytest.fail("it has left")

        nursery.start_soon(enter)
        for _ in range(after):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel(reason="the client left")
