"""The gate admits, queues and refuses at exact times, and is fair."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from protocol.errors import Draining, NotReady, Overloaded
from supervisor.doors.gate import Gate


def gate(requests_max=2, admit_s=5.0, waiting_max=2, why=None):
    reason = [why]
    made = Gate(requests_max, admit_s, waiting_max, lambda: reason[0])
    return made, reason


async def hold(gate, for_s, log, name, priority=0):
    try:
        async with gate.admitted(priority):
            log.append((trio.current_time(), name, "in"))
            await trio.sleep(for_s)
    except (Overloaded, Draining, NotReady) as error:
        log.append((trio.current_time(), name, error.code))


async def run(gate, *plans, log):
    """Start each `(at_s, for_s, name)` on time."""
    async with trio.open_nursery() as nursery:
        for at_s, for_s, name in plans:
            await trio.sleep(at_s - trio.current_time())
            nursery.start_soon(hold, gate, for_s, log, name)
            await trio.testing.wait_all_tasks_blocked()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_as_many_as_there_are_places_are_admitted_at_once(autojump_clock):
    made, _ = gate()
    log = []
    await run(made, (0, 3, "a"), (0, 3, "b"), (1, 1, "c"), log=log)
    assert log == [(0, "a", "in"), (0, "b", "in"), (3, "c", "in")]


async def test_one_that_waits_too_long_hears_when_to_come_back(autojump_clock):
    made, _ = gate(requests_max=1)
    log = []
    await run(made, (0, 9, "a"), (1, 1, "b"), log=log)
    assert log == [(0, "a", "in"), (6, "b", "overloaded")]


async def test_one_too_many_who_wait_is_refused_at_once(autojump_clock):
    made, _ = gate(requests_max=1)
    log = []
    await run(made, (0, 4, "a"), (1, 1, "b"), (1, 1, "c"), (2, 1, "d"), log=log)
    assert log == [(0, "a", "in"), (2, "d", "overloaded"), (4, "b", "in"), (5, "c", "in")]


async def test_nobody_overtakes_those_who_wait(autojump_clock):
    made, _ = gate(requests_max=1, waiting_max=8)
    log = []

    async def again_and_again():
        for turn in range(3):
            await hold(made, 1, log, f"a{turn}")  # comes back in the very turn in which it leaves

    async with trio.open_nursery() as nursery:
        nursery.start_soon(again_and_again)
        await trio.sleep(0.5)
        nursery.start_soon(hold, made, 1, log, "b")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(hold, made, 1, log, "c")
    assert [name for _, name, _ in log] == ["a0", "b", "c", "a1", "a2"]
    assert [at for at, _, _ in log] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_stays_empty_while_somebody_waits(seed, autojump_clock):
    import random

    rng = random.Random(seed)
    made, _ = gate(requests_max=3, admit_s=4.0, waiting_max=100)

    async def come_and_go():
        await trio.sleep(rng.randrange(20))
        with trio.move_on_after(rng.choice([1, 3, 7])):
            try:
                async with made.admitted():
                    assert made.inside <= 3
                    await trio.sleep(rng.randrange(3))
            except Overloaded:
                assert made.inside == 3

    async def look():
        for _ in range(40):
            await trio.sleep(0.5)
            await trio.testing.wait_all_tasks_blocked()
            assert made.inside == 3 or made.waiting == 0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for _ in range(60):
            nursery.start_soon(come_and_go)
    assert (made.inside, made.waiting) == (0, 0)


async def test_a_drain_wakes_those_who_wait_and_refuses_the_rest(autojump_clock):
    made, _ = gate(requests_max=1)
    log = []

    async def drain():
        await trio.sleep(2)
        made.drain()
        await made.wait_empty()
        log.append((trio.current_time(), "gate", "empty"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        await run(made, (0, 4, "a"), (1, 1, "b"), (3, 1, "c"), log=log)
    assert log == [(0, "a", "in"), (2, "b", "draining"), (3, "c", "draining"), (4, "gate", "empty")]


async def test_an_empty_gate_is_empty_at_once(autojump_clock):
    made, _ = gate()
    await made.wait_empty()
    assert trio.current_time() == 0


async def test_an_unready_server_admits_nobody_and_says_why(autojump_clock):
    made, reason = gate(why="engine a is still starting")
    with pytest.raises(NotReady, match="engine a is still starting"):
        async with made.admitted():
            pass
    reason[0] = None
    async with made.admitted():
        assert made.inside == 1


async def test_a_server_that_becomes_unready_tells_those_who_wait(autojump_clock):
    made, reason = gate(requests_max=1)
    log = []

    async def lose():
        await trio.sleep(2)
        reason[0] = "gone"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        await run(made, (0, 3, "a"), (1, 1, "b"), log=log)
    assert log == [(0, "a", "in"), (3, "b", "not_ready")]


@pytest.mark.parametrize("leave_at", [0.5, 2.0])
async def test_one_that_leaves_while_waiting_gives_its_turn_away(leave_at, autojump_clock):
    made, _ = gate(requests_max=1)
    log = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, made, 2, log, "a")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(leave_at):
            nursery.start_soon(hold, made, 1, log, "later")
            await hold(made, 1, log, "b")
    assert made.waiting == made.inside == 0
    assert (2.0, "later", "in") in log or (3.0, "later", "in") in log


async def test_an_error_inside_frees_the_place(autojump_clock):
    made, _ = gate(requests_max=1)
    with pytest.raises(KeyError):
        async with made.admitted():
            raise KeyError
    assert made.inside == 0


# Priorities ------------------------------------------------------------------------------------


async def line_up(gate, log, *waiters):
    """Fill the gate for 10 s, and let `(name, priority)` wait in this order."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, gate, 10, log, "first")
        await trio.testing.wait_all_tasks_blocked()
        for name, priority in waiters:
            nursery.start_soon(hold, gate, 1, log, name, priority)
            await trio.testing.wait_all_tasks_blocked()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_of_those_who_wait_the_highest_priority_goes_first_and_of_equals_the_first(autojump_clock):
    made, _ = gate(requests_max=1, admit_s=60, waiting_max=8)
    log = []
    await line_up(made, log, ("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0), ("f", 7))
    assert [name for _, name, _ in log] == ["first", "f", "b", "d", "a", "e", "c"]
    assert [at for at, _, _ in log] == [0, 10, 11, 12, 13, 14, 15]


async def test_a_high_priority_overtakes_nobody_who_is_inside(autojump_clock):
    made, _ = gate(requests_max=1, admit_s=5)
    log = []
    await line_up(made, log, ("a", 100))
    assert log == [(0, "first", "in"), (5, "a", "overloaded")]


@pytest.mark.parametrize("seed", range(30))
async def test_whoever_leaves_the_line_leaves_no_hole_in_it(seed, autojump_clock):
    import random

    rng = random.Random(seed)
    made, _ = gate(requests_max=1, admit_s=1000, waiting_max=100)
    came, went = [], []

    async def come(number, priority, patience):
        with trio.move_on_after(patience):
            async with made.admitted(priority):
                went.append((priority, number))
                await trio.sleep(5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, made, 50, [], "first")
        await trio.testing.wait_all_tasks_blocked()
        for number in range(12):
            priority, patience = rng.randrange(3), rng.choice([1, 20, 50, 10_000])  # 50: in the very turn
            came.append((priority, number, patience))
            nursery.start_soon(come, number, priority, patience)
            await trio.testing.wait_all_tasks_blocked()
    assert (made.inside, made.waiting) == (0, 0)
    stayed = {(priority, number) for priority, number, patience in came if patience > 50}
    maybe = {(priority, number) for priority, number, patience in came if patience == 50}
    assert stayed <= set(went) <= stayed | maybe
    assert went == sorted(went, key=lambda each: (-each[0], each[1]))


async def test_a_place_given_to_one_who_is_being_cancelled_goes_to_the_next(autojump_clock):
    made, _ = gate(requests_max=1, admit_s=60, waiting_max=8)
    log, scope = [], trio.CancelScope()

    async def cancelled():
        with scope:
            await hold(made, 1, log, "b", 9)

    async with trio.open_nursery() as nursery:
        async with made.admitted():
            nursery.start_soon(cancelled)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(hold, made, 1, log, "c")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
        assert made.inside == 1  # given in this very turn, to one who will not come
    assert log == [(0, "c", "in")]
    assert (made.inside, made.waiting) == (0, 0)
