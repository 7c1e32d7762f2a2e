"""Failures in virtual time: how many a tree permits, starts that fail, and back-off; every time is exact."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import EngineDied, StartFailed
from supervisor.supervision.events import ChildEventKind
from supervisor.supervision.supervise import RestartsExceeded
from supervisor.supervision.tree import Backoff, Child
from tests.rig.supervision import (
    ALL,
    FAILS_TO_START,
    REST,
    TEMPORARY,
    TRANSIENT,
    Chances,
    EventLog,
    Life,
    child,
    fails_every,
    listed,
    restarting,
    supervised,
    tree,
)

# Intensity -----------------------------------------------------------------------------


async def test_one_failure_too_many_ends_the_tree(autojump_clock: MockClock) -> None:
    with pytest.raises(RestartsExceeded) as caught:  # and no group is around it
        await supervised(tree(fails_every(1), restarts_max=3, restarts_window_s=30))
    assert trio.current_time() == 4
    assert str(caught.value) == "too many failures (4 within 30 s), the last that of t/a: ValueError: it broke"
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("lasts_s", "restarts_max", "ends_at"),
    [
        pytest.param({"a": [10] * 9}, 3, 40, id="both ends of the window belong to it"),
        pytest.param({"a": [1, 39, 5]}, 1, 45, id="old failures do not hide new ones"),
        pytest.param({"a": [7]}, 0, 7, id="the limit may be no restart at all"),
        pytest.param({"a": [2] * 9, "b": [3] * 9}, 3, 6, id="failures of all children count together"),
    ],
)
async def test_a_tree_gives_up_at_the_first_failure_beyond_its_limit(
    lasts_s: dict[str, Any], restarts_max: int, ends_at: int, autojump_clock: MockClock
) -> None:
    children = [child(name, *(Life(lasts_s=life_s) for life_s in lives)) for name, lives in lasts_s.items()]
    with pytest.raises(RestartsExceeded):
        await supervised(tree(*children, restarts_max=restarts_max, restarts_window_s=30))
    assert trio.current_time() == ends_at


@pytest.mark.parametrize(("every_s", "window_s"), [(10, 29.9), (20, 30)])
async def test_failures_before_the_window_are_forgiven(
    every_s: int, window_s: float, autojump_clock: MockClock
) -> None:
    events = await supervised(tree(fails_every(every_s), restarts_max=3, restarts_window_s=window_s), 900)
    assert len(events.starts()) == 900 / every_s


async def test_a_child_that_dies_as_soon_as_it_is_ready_does_not_spin_for_ever(autojump_clock: MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> NoReturn:
        task_status.started()
        raise KeyError("at once")

    events = EventLog()
    with pytest.raises(RestartsExceeded):
        await supervised(tree(child("a"), Child(name="b", run=run), restarts_max=2), events=events)
    assert trio.current_time() == 0
    assert events.starts() == ["0 a", "0 b", "0 b", "0 b"]
    assert events.lines()[-4:] == ["0 t/b FAILED", "0 t GAVE_UP", "0 t/a STOPPING", "0 t/a STOPPED"]


async def test_restarts_multiply_over_the_levels(autojump_clock: MockClock) -> None:
    inner = tree(fails_every(1), name="inner", restarts_max=3)
    events = EventLog()
    with pytest.raises(RestartsExceeded) as caught:
        await supervised(tree(inner, restarts_max=2, restarts_window_s=60), events=events)
    assert trio.current_time() == 12
    assert len(events.lines(ChildEventKind.STARTED)) == 12 + 3
    assert events.lines(ChildEventKind.GAVE_UP) == listed(
        "4 t/inner GAVE_UP, 8 t/inner GAVE_UP, 12 t/inner GAVE_UP, 12 t GAVE_UP"
    )
    assert str(caught.value) == (
        "too many failures (3 within 60 s), the last that of t/inner: "
        "too many failures (4 within 30 s), the last that of t/inner/a: ValueError: it broke"
    )


async def test_a_nested_tree_that_gives_up_is_one_failure_of_its_parent(autojump_clock: MockClock) -> None:
    slow = Life(cleans_up_s=2)
    inner = tree(child("a", slow), child("b", Life(lasts_s=1)), name="inner", restarts_max=0)
    events = await supervised(tree(inner, child("z", slow), strategy=REST), 10)
    assert events.lines()[8:18] == listed(
        "1 t/inner/b FAILED, 1 t/inner GAVE_UP, 1 t/inner/a STOPPING, 3 t/inner/a STOPPED, 3 t/inner FAILED",
        "3 t/inner RESTARTING, 3 t/z STOPPING, 5 t/z STOPPED, 5 t/inner STARTING, 5 t/inner/a STARTING",
    )
    assert events.starts()[4:] == ["5 a", "5 b", "5 inner", "5 z"]


# Starts that fail ----------------------------------------------------------------------


async def test_a_first_start_that_fails_stops_what_runs_and_reaches_the_operator(autojump_clock: MockClock) -> None:
    events = EventLog()
    bad = evolve(child("bad", FAILS_TO_START), restart=TEMPORARY)  # whatever its restart type
    with pytest.raises(StartFailed) as caught:
        await supervised(tree(child("a"), bad, child("c")), events=events)
    assert str(caught.value) == "t/bad could not start: OSError: no device"
    assert isinstance(caught.value.__cause__, OSError)
    assert events.lines()[2:] == ["0 t/bad STARTING", "0 t/bad FAILED", "0 t/a STOPPING", "0 t/a STOPPED"]


async def test_the_error_of_a_failed_start_passes_through_every_level(autojump_clock: MockClock) -> None:
    sentence = StartFailed("Port 8000 is taken; choose another.")

    async def run(*, task_status: trio.TaskStatus[None]) -> NoReturn:
        raise sentence

    with pytest.raises(StartFailed) as caught:
        await supervised(tree(tree(Child(name="a", run=run), name="inner")))
    assert caught.value is sentence
    assert caught.value.__cause__ is None


async def test_a_failed_start_has_the_sentences_of_a_group_of_errors_and_keeps_the_group(
    autojump_clock: MockClock,
) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> NoReturn:
        raise ExceptionGroup("two", [EngineDied("It exited with 1."), OSError("no device")])

    with pytest.raises(StartFailed) as caught:
        await supervised(tree(Child(name="a", run=run)))
    assert str(caught.value) == "t/a could not start: It exited with 1. | OSError: no device"
    assert isinstance(caught.value.__cause__, ExceptionGroup)


async def test_a_start_that_takes_too_long_has_failed(autojump_clock: MockClock) -> None:
    events = EventLog()
    slow = child("b", Life(ready_after_s=5, cleans_up_s=1), start_within_s=3)
    with pytest.raises(StartFailed) as caught:
        await supervised(tree(child("a"), slow), events=events)
    assert str(caught.value) == "t/b was not ready within 3 s."
    assert events.lines()[2:] == listed(
        "0 t/b STARTING, 3 t/b FAILED, 3 t/b STOPPING, 4 t/b STOPPED, 4 t/a STOPPING, 4 t/a STOPPED"
    )


async def test_a_child_that_is_ready_at_its_deadline_may_fail_or_not_but_the_start_never_hangs(
    autojump_clock: MockClock,
) -> None:
    """In the same instant either may come first; what must not happen is that the start hangs."""
    try:
        await supervised(tree(child("a", Life(ready_after_s=3), start_within_s=3)), 9)
    except StartFailed:
        assert trio.current_time() == 3
    else:
        assert trio.current_time() == 9


async def test_a_child_that_ends_before_it_is_ready_has_failed_to_start(autojump_clock: MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(1)

    with pytest.raises(StartFailed, match=r"^t/a ended before it was ready\.$"):
        await supervised(tree(Child(name="a", run=run, restart=TRANSIENT)))


async def test_failed_starts_during_a_restart_are_retried_with_growing_waits(autojump_clock: MockClock) -> None:
    backoff = Backoff(min_s=1, max_s=5, jitter=0.5, reset_after_s=60)
    value = tree(restarting(*[FAILS_TO_START] * 4), restarts_max=5, backoff=backoff)
    events = await supervised(value, 60, Chances(0, 0.5, 1, 0.2))
    assert events.waits() == [0, 1, 2 * 1.25, 4 * 1.5, 5 * 1.1]
    assert events.starts() == ["0 a", "16 a"]  # 1 + 1 + 2.5 + 6 + 5.5


async def test_starts_that_are_too_slow_during_a_restart_are_retried_too(autojump_clock: MockClock) -> None:
    value = tree(restarting(Life(ready_after_s=9, cleans_up_s=2), start_within_s=4), backoff=Backoff(min_s=1, jitter=0))
    events = await supervised(value, 30)
    assert events.lines()[2:-2] == listed(
        "1 t/a FAILED, 1 t/a RESTARTING, 1 t/a STARTING, 5 t/a FAILED, 5 t/a STOPPING, 7 t/a STOPPED",
        "7 t/a RESTARTING, 8 t/a STARTING, 8 t/a STARTED",
    )


async def test_a_slow_start_that_does_not_stop_either_counts_once(autojump_clock: MockClock) -> None:
    uncancellable = Life(ready_after_s=9, cleans_up_s=9)
    value = tree(restarting(uncancellable, start_within_s=4, stop_within_s=2), backoff=Backoff(min_s=1, jitter=0))
    events = await supervised(value, 30)
    assert events.waits() == [0, 1]
    assert events.starts() == ["0 a", "14 a"]


@pytest.mark.parametrize(("up_s", "wait_s"), [(9.9, 2), (10, 1)])
async def test_the_back_off_begins_anew_after_a_quiet_time(autojump_clock: MockClock, up_s: float, wait_s: int) -> None:
    lives = FAILS_TO_START, Life(lasts_s=up_s), FAILS_TO_START
    value = tree(restarting(*lives), restarts_max=4, backoff=Backoff(min_s=1, jitter=0, reset_after_s=10))
    events = await supervised(value, 100)
    assert events.waits() == [0, 1, 0, wait_s]


async def test_time_spent_starting_or_waiting_is_not_quiet(autojump_clock: MockClock) -> None:
    slow = Life(ready_after_s=20, starts=False)
    backoff = Backoff(min_s=12, max_s=100, jitter=0, reset_after_s=10)
    value = tree(restarting(slow, slow, slow, start_within_s=30), backoff=backoff)
    assert (await supervised(value, 300)).waits() == [0, 12, 24, 48]


async def test_a_back_off_may_go_on_for_ever(autojump_clock: MockClock, unlogged: None) -> None:
    backoff = Backoff(min_s=1, max_s=40, jitter=0)
    value = tree(restarting(*[FAILS_TO_START] * 1100), restarts_max=9, restarts_window_s=60, backoff=backoff)
    events = await supervised(value, 100_000)
    assert events.waits()[-1] == 40
    assert len(events.starts()) == 2


async def test_a_cancel_interrupts_the_back_off_at_once(autojump_clock: MockClock) -> None:
    events = await supervised(tree(restarting(FAILS_TO_START), child("b"), backoff=Backoff(min_s=30)), 11)
    assert trio.current_time() == 11
    assert events.lines()[-3:] == ["1 t/a RESTARTING", "11 t/b STOPPING", "11 t/b STOPPED"]


async def test_a_cancel_interrupts_a_start_during_a_restart_at_once(autojump_clock: MockClock) -> None:
    events = await supervised(tree(restarting(Life(ready_after_s=50), start_within_s=100), child("b")), 11)
    assert events.lines()[-4:] == ["11 t/b STOPPING", "11 t/b STOPPED", "11 t/a STOPPING", "11 t/a STOPPED"]


async def test_a_cancel_during_the_stop_of_a_group_goes_on_with_it(autojump_clock: MockClock) -> None:
    c = child("c", Life(cleans_up_s=4))
    events = await supervised(tree(child("a"), child("b", Life(lasts_s=1)), c, strategy=REST), 2)
    assert events.starts() == ["0 a", "0 b", "0 c"]
    assert events.stops() == ["5 c", "5 a"]


async def test_others_are_restarted_while_one_waits_in_its_back_off(autojump_clock: MockClock) -> None:
    b = child("b", Life(lasts_s=5))
    events = await supervised(tree(restarting(FAILS_TO_START), b, backoff=Backoff(min_s=10, jitter=0)), 20)
    assert events.starts() == ["0 a", "0 b", "5 b", "11 a"]


async def test_the_rest_waits_with_the_one_that_could_not_start(autojump_clock: MockClock) -> None:
    value = tree(child("z"), restarting(FAILS_TO_START), child("c"), strategy=REST, backoff=Backoff(min_s=10, jitter=0))
    events = await supervised(value, 20)
    assert events.starts() == ["0 z", "0 a", "0 c", "11 a", "11 c"]


async def test_all_wait_together_where_all_restart_together(autojump_clock: MockClock) -> None:
    value = tree(child("z"), restarting(FAILS_TO_START), child("c"), strategy=ALL, backoff=Backoff(min_s=10, jitter=0))
    events = await supervised(value, 20)
    assert events.starts() == ["0 z", "0 a", "0 c", "1 z", "11 z", "11 a", "11 c"]


async def test_an_earlier_failure_does_not_shorten_the_wait_of_a_later_child(autojump_clock: MockClock) -> None:
    value = tree(
        child("z", Life(lasts_s=4)), restarting(FAILS_TO_START), strategy=REST, backoff=Backoff(min_s=10, jitter=0)
    )
    events = await supervised(value, 20)
    assert events.starts() == ["0 z", "0 a", "4 z", "11 a"]


async def test_a_nested_tree_that_cannot_come_up_again_is_retried_by_its_parent(autojump_clock: MockClock) -> None:
    a = child("a", Life(lasts_s=1), FAILS_TO_START, Life(), Life())
    inner = tree(child("y"), a, name="inner", restarts_max=0)
    events = await supervised(tree(inner, backoff=Backoff(min_s=3, jitter=0)), 20)
    assert events.lines(ChildEventKind.RESTARTING, ChildEventKind.GAVE_UP) == [
        "1 t/inner GAVE_UP",
        "1 t/inner RESTARTING",
        "1 t/inner RESTARTING",
    ]
    assert events.waits() == [0, 3]
    assert events.starts() == ["0 y", "0 a", "0 inner", "1 y", "4 y", "4 a", "4 inner"]
