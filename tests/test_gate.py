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


async def hold(gate, for_s, log, name):
    try:
        async with gate.admitted():
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
