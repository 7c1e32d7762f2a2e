"""Siblings in virtual time: their needs, restarts beside each other, and trees that never give up."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import EngineDied, StartFailed
from supervisor.supervision.events import ChildEventKind
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import Backoff, Child, Strategy, Tree
from tests.rig.supervision import FAILS_TO_START, Chances, EventLog, Life, child, fails_every, listed, supervised, tree

NEVER = Backoff(min_s=1, max_s=8, jitter=0, reset_after_s=60, crashes=True)


def beside(name: str, *lives: Life, needs: tuple[str, ...] = (), **fields: int) -> Child:
    return child(name, *lives, needs=needs, **fields)


# Starting and stopping together ----------------------------------------------------------


async def test_one_that_fails_while_another_starts_for_the_first_time_is_up_again_at_once(
    autojump_clock: MockClock,
) -> None:
    gateway = child("gateway", Life(lasts_s=5))
    engine = child("engine", Life(ready_after_s=60), start_within_s=100)
    events = await supervised(tree(gateway, engine), 90)
    assert events.starts() == ["0 gateway", "5 gateway", "60 engine"]


async def test_no_sibling_waits_while_a_slow_start_is_ended(autojump_clock: MockClock) -> None:
    slow = Life(ready_after_s=50, cleans_up_s=9)
    engine = child("engine", Life(lasts_s=1), slow, start_within_s=4, stop_within_s=12)
    gateway = child("gateway", Life(lasts_s=6))  # while the engine cleans up
    events = await supervised(tree(engine, gateway, backoff=Backoff(min_s=1, jitter=0)), 30)
    assert events.starts() == ["0 engine", "0 gateway", "6 gateway", "15 engine"]


async def test_eight_engines_load_in_the_time_of_one_and_stop_in_that_of_one(autojump_clock: MockClock) -> None:
    life = Life(ready_after_s=60, cleans_up_s=9)
    engines = [beside(f"e{n}", life, needs=("gateway",), start_within_s=100, stop_within_s=10) for n in range(8)]
    value = tree(child("gateway", Life(ready_after_s=1, cleans_up_s=1)), *engines)
    events = await supervised(value, 100)
    assert events.starts()[0] == "1 gateway"
    assert sorted(events.starts()[1:]) == [f"61 e{n}" for n in range(8)]
    assert events.stops()[-1] == "110 gateway"  # it goes last
    assert trio.current_time() == 110
    assert value.stop_within_s == 15


async def test_a_child_starts_after_those_it_needs_and_stops_before_them(autojump_clock: MockClock) -> None:
    slow = Life(ready_after_s=3, cleans_up_s=2)
    value = tree(
        beside("a", slow), beside("b", slow), beside("c", slow, needs=("a",)), beside("d", needs=("c",)), child("e")
    )
    events = await supervised(value, 20)
    assert sorted(events.starts()[:2]) == ["3 a", "3 b"]
    assert events.starts()[2:] == ["6 c", "6 d", "6 e"]
    assert events.lines(ChildEventKind.STOPPING) == listed(
        "20 t/e STOPPING, 20 t/d STOPPING, 20 t/b STOPPING, 20 t/c STOPPING, 22 t/a STOPPING"
    )


async def test_a_need_holds_through_a_sibling_that_has_ended(autojump_clock: MockClock) -> None:
    """`c` needs `a` by way of `b`, which is gone when all are stopped."""
    a, c = beside("a"), beside("c", Life(cleans_up_s=2), needs=("b",))
    b = beside("b", Life(lasts_s=1), needs=("a",))
    events = await supervised(tree(a, b, c, backoff=Backoff(min_s=9, crashes=True)), 5)
    assert events.stops() == ["7 c", "7 a"]


async def test_a_restart_waits_for_no_sibling_though_a_start_does(autojump_clock: MockClock) -> None:
    a = child("a", Life(lasts_s=5), Life(ready_after_s=30), start_within_s=50)
    b = child("b", Life(lasts_s=6))  # while what it needs is not there
    events = await supervised(tree(a, b), 60)
    assert events.starts() == ["0 a", "0 b", "6 b", "35 a"]


async def test_a_first_start_that_fails_ends_those_that_start_beside_it(autojump_clock: MockClock) -> None:
    a, b = beside("a", Life(ready_after_s=50), start_within_s=60), beside("b", Life(ready_after_s=2, starts=False))
    events = EventLog()
    with pytest.raises(StartFailed, match="t/b could not start"):
        await supervised(tree(a, b), events=events)
    assert events.lines()[-3:] == ["2 t/b FAILED", "2 t/a STOPPING", "2 t/a STOPPED"]


# Never giving up -------------------------------------------------------------------------


def never(*children: Child, name: str = "bad", **fields: Backoff) -> Tree:
    every: dict[str, Any] = {"strategy": Strategy.ONE_FOR_ALL, "restarts_max": None, "backoff": NEVER, "needs": ()}
    return tree(*children, name=name, **{**every, **fields})


async def test_one_engine_that_keeps_failing_is_alone_in_it(autojump_clock: MockClock) -> None:
    """It crashes 1 s after each start; its neighbours never notice."""
    bad = never(fails_every(1, "engine"), child("decode"))
    value = tree(child("gateway"), bad, child("good", needs=()), restarts_max=5, restarts_window_s=300)
    events = await supervised(value, 200)
    assert {line for line in events.starts() if "gateway" in line or "good" in line} == {"0 gateway", "0 good"}
    crashes = [x.at for x in events.all if x.kind is ChildEventKind.FAILED]
    assert crashes[:8] == [1, 3, 6, 11, 20, 29, 38, 47]  # waits of 1, 2, 4, 8 and then 8 s, a second's life between
    assert events.lines(ChildEventKind.GAVE_UP) == []


async def test_a_gpu_that_is_gone_ends_neither_its_node_nor_its_neighbours(autojump_clock: MockClock) -> None:
    """After a crash each start fails, 5 s after it began."""
    gone = Life(ready_after_s=5, starts=False)
    bad = never(child("engine", Life(lasts_s=10), *[gone] * 99, start_within_s=60))
    events = await supervised(tree(child("gateway"), bad, child("good", needs=()), restarts_max=5), 600)
    assert trio.current_time() == 600
    assert {"600 gateway", "600 good"} <= set(events.stops())
    assert events.waits()[:5] == [1, 1 * 2, 4, 8, 8]


async def test_the_back_off_after_crashes_begins_anew_after_a_quiet_time(autojump_clock: MockClock) -> None:
    lives = [Life(lasts_s=1)] * 3 + [Life(lasts_s=60)] + [Life(lasts_s=1)] * 2
    events = await supervised(tree(never(child("engine", *lives))), 200)
    assert events.waits() == [1, 2, 4, 1, 2, 4]


async def test_waits_of_engines_that_fail_together_are_spread_by_chance(autojump_clock: MockClock) -> None:
    backoff = Backoff(min_s=1, max_s=30, jitter=0.5, crashes=True)
    trees = [never(child("engine", Life(lasts_s=1)), name=name, backoff=backoff) for name in ("a", "b")]
    events = await supervised(tree(*trees), 9, rng=random.Random(1))
    first, second = events.waits()
    assert first != second
    assert all(1 <= wait <= 1.5 for wait in (first, second))


async def test_a_first_start_that_fails_is_tried_again_where_a_tree_never_gives_up(autojump_clock: MockClock) -> None:
    bad = never(child("engine", FAILS_TO_START, FAILS_TO_START))
    events = EventLog()
    async with trio.open_nursery() as nursery:
        value = tree(child("gateway"), bad, child("good", Life(ready_after_s=2), needs=()), child("last"))
        await nursery.start(partial(supervise, value, rng=Chances(), on_event=events))
        assert trio.current_time() == 2  # the tree above does not wait for it, nor does who needs it
        await trio.sleep(8)
        nursery.cancel_scope.cancel()
    assert events.starts() == ["0 gateway", "2 good", "2 last", "3 engine", "3 bad"]


async def test_a_tree_that_never_gives_up_keeps_its_group_together(autojump_clock: MockClock) -> None:
    engine = child("engine", Life(lasts_s=2, error=EngineDied("It exited with 1.")))
    events = await supervised(tree(never(engine, child("decode", Life(cleans_up_s=3)))), 20)
    assert events.starts() == ["0 engine", "0 decode", "0 bad", "5 engine", "5 decode"]  # no two lives of one child
