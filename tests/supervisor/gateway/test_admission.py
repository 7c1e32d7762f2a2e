"""Admission: requests are admitted, queued, displaced and refused in the right order and at exact times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


async def test_requests_are_admitted_at_once_while_there_are_places(autojump_clock: MockClock) -> None:
    gate = make_gate()
    log = await run(gate, (0, 3, "a"), (0, 3, "b"), (1, 1, "c"))
    assert log == [(0, "a", "in"), (0, "b", "in"), (3, "c", "in")]


async def test_a_request_that_waits_longer_than_admit_s_is_refused(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    log = await run(gate, (0, 9, "a"), (1, 1, "b"))
    assert log == [(0, "a", "in"), (6, "b", "overloaded")]


async def test_a_request_beyond_waiting_max_is_refused_at_once(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    log = await run(gate, (0, 4, "a"), (1, 1, "b"), (1, 1, "c"), (2, 1, "d"))
    assert log == [(0, "a", "in"), (2, "d", "overloaded"), (4, "b", "in"), (5, "c", "in")]


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


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_stays_empty_while_a_request_waits(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    gate = make_gate(requests_max=3, admit_s=4.0, waiting_max=100)

    async def come_and_go() -> None:
        await trio.sleep(rng.randrange(20))
        with trio.move_on_after(rng.choice([1, 3, 7])):
            try:
                async with gate.admitted():
                    assert gate.inside <= 3
                    await trio.sleep(rng.randrange(3))
            except Overloaded:
                assert gate.inside == 3

    async def look() -> None:
        for _ in range(40):
            await trio.sleep(0.5)
            await wait_all_tasks_blocked()
            assert gate.inside == 3 or gate.waiting == 0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for _ in range(60):
            nursery.start_soon(come_and_go)
    assert (gate.inside, gate.waiting) == (0, 0)


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


async def test_an_empty_gate_is_empty_at_once(autojump_clock: MockClock) -> None:
    gate = make_gate()
    await gate.wait_empty()
    assert trio.current_time() == 0


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


@pytest.mark.parametrize("leave_at", [0.5, 2.0])
async def test_a_request_that_is_cancelled_while_it_waits_passes_its_turn_on(
    leave_at: float, autojump_clock: MockClock
) -> None:
    gate = make_gate(requests_max=1)
    log: Log = []
    async with trio.open_nursery() as nursery:
        await come(nursery, gate, log, "a", for_s=2)
        with trio.move_on_after(leave_at):
            nursery.start_soon(hold, gate, 1, log, "later")
            await hold(gate, 1, log, "b")
    assert gate.waiting == gate.inside == 0
    assert (2.0, "later", "in") in log or (3.0, "later", "in") in log


async def test_an_error_inside_frees_the_place(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1)
    with pytest.raises(KeyError):
        async with gate.admitted():
            raise KeyError
    assert gate.inside == 0


# Priorities ------------------------------------------------------------------------------------


async def line_up(gate: AdmissionGate, *waiters: tuple[str, int]) -> Log:
    """Fill the gate for 10 s, let `(name, priority)` wait in this order, and return what became of all."""
    log: Log = []
    async with trio.open_nursery() as nursery:
        await come(nursery, gate, log, "first", for_s=10)
        for name, priority in waiters:
            await come(nursery, gate, log, name, priority)
    assert (gate.inside, gate.waiting) == (0, 0)
    return log


async def test_the_highest_priority_goes_first_and_of_equals_the_oldest(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=8)
    log = await line_up(gate, ("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0), ("f", 7))
    assert [name for _, name, _ in log] == ["first", "f", "b", "d", "a", "e", "c"]
    assert [at for at, _, _ in log] == [0, 10, 11, 12, 13, 14, 15]


async def test_a_high_priority_ends_no_request_that_is_inside(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=5)
    log = await line_up(gate, ("a", 100))
    assert log == [(0, "first", "in"), (5, "a", "overloaded")]


@pytest.mark.parametrize("seed", range(30))
async def test_requests_that_leave_the_queue_do_not_change_the_order_of_the_others(
    seed: int, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    gate = make_gate(requests_max=1, admit_s=1000, waiting_max=100)
    came, went = [], []

    async def enter(number: int, priority: int, patience: int) -> None:
        with trio.move_on_after(patience):
            async with gate.admitted(priority):
                went.append((priority, number))
                await trio.sleep(5)

    async with trio.open_nursery() as nursery:
        await come(nursery, gate, [], "first", for_s=50)
        for number in range(12):
            priority, patience = rng.randrange(3), rng.choice([1, 20, 50, 10_000])  # 50: in the very turn
            came.append((priority, number, patience))
            nursery.start_soon(enter, number, priority, patience)
            await wait_all_tasks_blocked()
    assert (gate.inside, gate.waiting) == (0, 0)
    stayed = {(priority, number) for priority, number, patience in came if patience > 50}
    maybe = {(priority, number) for priority, number, patience in came if patience == 50}
    assert stayed <= set(went) <= stayed | maybe
    assert went == sorted(went, key=lambda each: (-each[0], each[1]))


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


async def test_a_higher_priority_displaces_the_newest_of_the_lowest_from_a_full_queue(
    autojump_clock: MockClock,
) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=3)
    log = await line_up(gate, ("a", -1), ("b", 0), ("c", -1), ("d", 5))
    assert log == [(0, "first", "in"), (0, "c", "overloaded"), (10, "d", "in"), (11, "b", "in"), (12, "a", "in")]


@pytest.mark.parametrize("priority", [3, 2, -1])
async def test_a_request_displaces_none_of_equal_or_higher_priority(priority: int, autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=2)
    log = await line_up(gate, ("a", 3), ("b", 4), ("c", priority))
    assert log == [(0, "first", "in"), (0, "c", "overloaded"), (10, "b", "in"), (11, "a", "in")]


async def test_no_request_is_displaced_while_the_queue_has_room(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=2)
    log = await line_up(gate, ("a", 0), ("b", 1))
    assert log == [(0, "first", "in"), (10, "b", "in"), (11, "a", "in")]


async def test_a_displaced_request_gets_the_reason_and_a_retry_after(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
    async with trio.open_nursery() as nursery, gate.admitted():
        nursery.start_soon(hold, gate, 1, [], "b", 1)
        with pytest.raises(Overloaded, match="one with a higher priority displaced this one") as refused:
            async with gate.admitted(0):
                pytest.fail("there was no place")
    assert refused.value.retry_after_s == 1


class Around(trio.abc.Instrument):
    """Acts just before, or just after, the second step of the task called `b`, in which it comes to the gate."""

    def __init__(self, act: Callable[..., None], *, before: bool = False) -> None:
        self.act, self.before, self.steps = act, before, 0

    def before_task_step(self, task: Task) -> None:
        self.steps += task.name == "b"
        if task.name == "b" and self.before and self.steps == 2:
            self.act()

    def after_task_step(self, task: Task) -> None:
        if task.name == "b" and not self.before and self.steps == 2:
            self.act()


@contextmanager
def around(act: Callable[..., None], *, before: bool = False) -> Iterator[None]:
    instrument = Around(act, before=before)
    trio.lowlevel.add_instrument(instrument)
    yield
    trio.lowlevel.remove_instrument(instrument)  # raises if it has failed


@pytest.mark.parametrize("cancelled_first", [False, True])
async def test_a_request_that_is_displaced_and_cancelled_in_one_turn_is_removed_once(
    cancelled_first: bool, autojump_clock: MockClock
) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
    log, scope = Log(), trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await hold(gate, 1, log, "a")

    async with trio.open_nursery() as nursery:
        await come(nursery, gate, log, "first", for_s=10)
        nursery.start_soon(cancelled)
        await wait_all_tasks_blocked()
        with around(scope.cancel, before=cancelled_first):
            await come(nursery, gate, log, "b", 9)
        assert scope.cancel_called
        assert (gate.inside, gate.waiting) == (1, 1)
    refused = [] if cancelled_first else [(0, "a", "overloaded")]
    assert log == [(0, "first", "in"), *refused, (10, "b", "in")]
    assert (gate.inside, gate.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_a_request_that_got_its_place_in_this_turn_is_not_displaced(seed: int) -> None:
    async def main(rng: random.Random) -> None:
        gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
        log, first = Log(), gate.admitted()
        await first.__aenter__()

        def leave() -> None:
            with pytest.raises(StopIteration):  # it leaves in one step
                first.__aexit__(None, None, None).send(None)

        async with trio.open_nursery() as nursery:
            await come(nursery, gate, log, "a", for_s=5)
            with around(leave, before=True):
                nursery.start_soon(hold, gate, 1, log, "b", 9, name="b")
                await trio.lowlevel.checkpoint()
                await come(nursery, gate, log, "c", 5)  # when the seed says so, before `a` has taken its place
            assert (gate.inside, gate.waiting) == (1, 1)
        assert sorted(log) == [(0, "a", "in"), (0, "c", "overloaded"), (5, "b", "in")]

    simulate(main, seed)


async def test_a_request_that_is_displaced_in_the_turn_of_a_drain_is_refused_as_draining(
    autojump_clock: MockClock,
) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
    log: Log = []
    async with trio.open_nursery() as nursery:
        await come(nursery, gate, log, "first", for_s=10)
        await come(nursery, gate, log, "a")
        with around(gate.drain):
            await come(nursery, gate, log, "b", 9)
        await come(nursery, gate, log, "c", 10)
        assert (gate.inside, gate.waiting) == (1, 0)
        await gate.wait_empty()
        assert trio.current_time() == 10
    assert log[0] == (0.0, "first", "in")
    assert sorted(log[1:]) == [(0, name, "draining") for name in "abc"]


async def test_a_drain_after_a_displacement_refuses_the_waiting_requests_only(autojump_clock: MockClock) -> None:
    gate = make_gate(requests_max=1, admit_s=60, waiting_max=1)
    log: Log = []
    async with trio.open_nursery() as nursery:
        for name, priority in [("first", 0), ("a", 0), ("b", 9)]:
            await come(nursery, gate, log, name, priority)
        gate.drain()
    assert log == [(0, "first", "in"), (0, "a", "overloaded"), (0, "b", "draining")]
    assert (gate.inside, gate.waiting) == (0, 0)


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


async def test_a_gate_that_gets_wider_admits_as_many_of_its_queue_as_it_has_room_for(autojump_clock: MockClock) -> None:
    gate, inside = AdmissionGate(1, 5.0, 10, lambda: None), list[int]()

    async def enter(number: int) -> None:
        async with gate.admitted():
            inside.append(number)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(enter, number)
            await wait_all_tasks_blocked()
        assert (gate.inside, gate.waiting) == (1, 4)
        gate.change(3, 5.0, 10)
        assert (gate.inside, gate.waiting) == (3, 2)
        await wait_all_tasks_blocked()
        assert sorted(inside) == [0, 1, 2]
        gate.change(1, 0.5, 1)
        assert (gate.inside, gate.waiting) == (3, 2)  # those inside stay
        with pytest.raises(Overloaded):
            async with gate.admitted():
                raise AssertionError
        await trio.sleep(0.9)
    assert sorted(inside) == [0, 1, 2, 3, 4]
    assert (gate.inside, gate.waiting) == (0, 0)


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
