"""Supervision in virtual time: every time below is exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import inf
from random import Random

import pytest
import trio
import trio.testing
from attrs import evolve, frozen

from protocol.errors import EngineDied, StartFailed
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.supervise import RestartsExceeded, supervise
from supervisor.supervision.tree import Backoff, Child, Restart, Strategy, Tree, render

ONE, REST, ALL = Strategy.ONE_FOR_ONE, Strategy.REST_FOR_ONE, Strategy.ONE_FOR_ALL
PERMANENT, TRANSIENT, TEMPORARY = Restart


class Chances:
    """The numbers that a test wants to be drawn, in turn, and then zeros."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0) if self.numbers else 0.0


IT_BROKE = ValueError("it broke")


@frozen
class Life:
    """What a child of a test does in one life."""

    ready_after_s: float = 0
    lasts_s: float = inf
    error: Exception | None = IT_BROKE  # at the end; None: it just ends
    starts: bool = True
    cleans_up_s: float = 0  # or, deaf: how long it ignores being cancelled


FAILS_TO_START = Life(starts=False)


def child(name: str, *lives: Life, **fields) -> Child:
    """A child that lives the given lives, then for ever."""
    left = list(lives)

    async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        life = left.pop(0) if left else Life()
        try:
            await trio.sleep(life.ready_after_s)
            if not life.starts:
                raise OSError("no device")
            task_status.started()
            await trio.sleep(life.lasts_s)
            if life.error is not None:
                raise type(life.error)(*life.error.args)
        finally:
            if life.cleans_up_s:
                with trio.CancelScope(shield=True):
                    await trio.sleep(life.cleans_up_s)

    return Child(name=name, run=run, **fields)


def tree(*children, name: str = "t", **fields: object) -> Tree:
    return Tree(name=name, children=children, **fields)


class Watch:
    """Remembers happenings, as `time path KIND`."""

    def __init__(self) -> None:
        self.all = []

    def __call__(self, happening) -> None:
        assert happening.at == trio.current_time()
        self.all.append(happening)

    def lines(self, *kinds: ChildEventKind):
        return [f"{x.at:g} {x.path} {x.kind.name}" for x in self.all if not kinds or x.kind in kinds]

    def starts(self):
        return [f"{x.at:g} {x.path.rpartition('/')[2]}" for x in self.all if x.kind is ChildEventKind.STARTED]

    def stops(self):
        return [f"{x.at:g} {x.path.rpartition('/')[2]}" for x in self.all if x.kind is ChildEventKind.STOPPED]

    def waits(self):
        return [x.wait_s for x in self.all if x.kind is ChildEventKind.RESTARTING]


async def watched(tree: Tree, seconds: int = 99_999, rng: Chances | Random | None = None, watch=None):
    """Supervise the tree, cancel it after so many seconds, and return what happened."""
    watch = watch or Watch()
    with trio.move_on_after(seconds):
        await supervise(tree, rng=rng or Chances(), on_event=watch)
    return watch


# Starting and stopping -----------------------------------------------------------------


async def test_children_start_in_order_and_stop_in_reverse(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a"), child("b"), child("c")), 1)
    assert watch.lines() == [
        "0 t/a STARTING",
        "0 t/a STARTED",
        "0 t/b STARTING",
        "0 t/b STARTED",
        "0 t/c STARTING",
        "0 t/c STARTED",
        "1 t/c STOPPING",
        "1 t/c STOPPED",
        "1 t/b STOPPING",
        "1 t/b STOPPED",
        "1 t/a STOPPING",
        "1 t/a STOPPED",
    ]


async def test_a_start_waits_until_the_one_before_is_ready(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a", Life(ready_after_s=2)), child("b", Life(ready_after_s=3)), child("c")), 9)
    assert watch.starts() == ["2 a", "5 b", "5 c"]


async def test_a_tree_is_ready_when_its_last_child_is(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        inner = tree(child("b", Life(ready_after_s=4)), child("c", Life(ready_after_s=4)), name="inner")
        value = tree(child("a", Life(ready_after_s=2)), inner)
        await nursery.start(partial(supervise, value, rng=Chances()))
        assert trio.current_time() == 10  # inside a tree each child has its own time
        nursery.cancel_scope.cancel()


async def test_a_child_gets_its_args_and_may_say_what_it_likes_when_it_is_ready(
    autojump_clock: trio.testing.MockClock,
) -> None:
    got = []

    async def run(*args, task_status) -> None:
        got.append(args)
        task_status.started(["a listener"])
        await trio.sleep_forever()

    await watched(tree(Child(name="a", run=run, args=(1, "two"))), 1)
    assert got == [(1, "two")]


async def test_stopping_waits_for_slow_cleaners_one_by_one(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(*(child(name, Life(cleans_up_s=0.5)) for name in "abc")), 1)
    assert watch.stops() == ["1.5 c", "2 b", "2.5 a"]
    assert trio.current_time() == 2.5


async def test_nested_trees_stop_in_reverse_too(autojump_clock: trio.testing.MockClock) -> None:
    slow = Life(cleans_up_s=1)
    inner = tree(child("b", slow), child("c", slow), name="inner")
    watch = await watched(tree(child("a", slow), inner, child("d", slow)), 1)
    assert watch.starts() == ["0 a", "0 b", "0 c", "0 inner", "0 d"]
    assert watch.stops() == ["2 d", "3 c", "4 b", "4 inner", "5 a"]


async def test_a_cancel_during_a_start_ends_it_at_once_and_stops_the_rest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = await watched(tree(child("a"), child("b", Life(ready_after_s=50), start_within_s=100), child("c")), 2)
    assert watch.lines()[2:] == [
        "0 t/b STARTING",
        "2 t/b STOPPING",
        "2 t/b STOPPED",
        "2 t/a STOPPING",
        "2 t/a STOPPED",
    ]


async def test_a_start_that_cleans_up_slowly_delays_the_stop_of_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = await watched(tree(child("a"), child("b", Life(ready_after_s=50, cleans_up_s=3), start_within_s=100)), 2)
    assert watch.stops() == ["5 b", "5 a"]


async def test_a_tree_that_is_cancelled_before_it_runs_starts_nothing(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a")), 0)
    assert watch.lines() == []


async def test_being_ready_at_the_moment_of_the_cancel_is_too_late(autojump_clock: trio.testing.MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(3)
        task_status.started()
        await trio.sleep_forever()

    watch = await watched(tree(Child(name="a", run=run)), 2)
    assert watch.lines() == ["0 t/a STARTING", "2 t/a STOPPING", "3 t/a STOPPED"]


async def test_an_error_while_stopping_is_shown_and_does_not_keep_the_others_alive(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("in its clean-up")

    watch = await watched(tree(child("a"), Child(name="b", run=run)), 1)
    assert watch.stops() == ["1 b", "1 a"]
    assert repr(watch.all[-3].error) == "KeyError('in its clean-up')"
    assert "KeyError: 'in its clean-up'" in caplog.text


async def test_an_empty_tree_is_ready_and_waits(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(supervise, tree(), rng=Chances()))
        await trio.sleep(10)
        nursery.cancel_scope.cancel()


# Strategies ----------------------------------------------------------------------------


async def test_one_for_one_restarts_only_the_one_that_failed(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a"), child("b", Life(lasts_s=1)), child("c")), 5)
    assert watch.lines()[6:-6] == [
        "1 t/b FAILED",
        "1 t/b RESTARTING",
        "1 t/b STARTING",
        "1 t/b STARTED",
    ]


async def test_rest_for_one_restarts_those_after_it_too(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a"), child("b", Life(lasts_s=1)), child("c"), child("d"), strategy=REST), 5)
    assert watch.lines()[8:-8] == [
        "1 t/b FAILED",
        "1 t/b RESTARTING",
        "1 t/d STOPPING",
        "1 t/d STOPPED",
        "1 t/c STOPPING",
        "1 t/c STOPPED",
        "1 t/b STARTING",
        "1 t/b STARTED",
        "1 t/c STARTING",
        "1 t/c STARTED",
        "1 t/d STARTING",
        "1 t/d STARTED",
    ]


async def test_one_for_all_restarts_all(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a"), child("b", Life(lasts_s=1)), child("c"), strategy=ALL), 5)
    assert watch.lines()[6:-6] == [
        "1 t/b FAILED",
        "1 t/b RESTARTING",
        "1 t/c STOPPING",
        "1 t/c STOPPED",
        "1 t/a STOPPING",
        "1 t/a STOPPED",
        "1 t/a STARTING",
        "1 t/a STARTED",
        "1 t/b STARTING",
        "1 t/b STARTED",
        "1 t/c STARTING",
        "1 t/c STARTED",
    ]


@pytest.mark.parametrize("strategy", [REST, ALL])
async def test_nothing_is_restarted_before_the_last_of_the_group_has_cleaned_up(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    watch = await watched(tree(child("b", Life(lasts_s=1)), child("c", Life(cleans_up_s=2)), strategy=strategy), 5)
    assert watch.starts() == ["0 b", "0 c", "3 b", "3 c"]


async def test_a_later_child_that_fails_while_it_is_stopped_counts_for_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # only a test may
            raise KeyError("torn off") from None

    b, c = child("b", Life(lasts_s=1)), Child(name="c", run=run)
    watch = await watched(tree(b, c, strategy=REST, restarts_max=1), 5)
    assert watch.starts() == ["0 b", "0 c", "1 b", "1 c"]
    assert len(watch.lines(ChildEventKind.RESTARTING)) == 1


@pytest.mark.parametrize("strategy", [REST, ALL])
@pytest.mark.parametrize("c_lasts_s", [1, 2])
async def test_one_that_falls_together_with_what_it_needs_counts_for_nothing(
    autojump_clock: trio.testing.MockClock, strategy: Strategy, c_lasts_s: int
) -> None:
    """It fell in the same instant, or while the group was being stopped."""
    a = child("a", Life(lasts_s=1))
    c = child("c", Life(lasts_s=c_lasts_s))
    d = child("d", Life(cleans_up_s=2))
    watch = await watched(tree(a, c, d, strategy=strategy, restarts_max=1), 9)
    assert watch.starts() == ["0 a", "0 c", "0 d", "3 a", "3 c", "3 d"]
    assert watch.lines(ChildEventKind.RESTARTING) == ["1 t/a RESTARTING"]


async def test_two_that_fail_at_once_are_both_restarted_and_both_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair = child("a", Life(lasts_s=1)), child("b", Life(lasts_s=1))
    watch = await watched(tree(*pair, restarts_max=2), 5)
    assert watch.starts()[:2] == ["0 a", "0 b"]
    assert sorted(watch.starts()[2:]) == ["1 a", "1 b"]  # beside each other
    pair = child("a", Life(lasts_s=1)), child("b", Life(lasts_s=1))
    with pytest.raises(RestartsExceeded):
        await watched(tree(*pair, restarts_max=1))


async def test_an_earlier_end_during_the_restart_of_the_rest_takes_them_along(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a = child("a", Life(lasts_s=2))
    b = child("b", Life(lasts_s=1), Life(ready_after_s=4), Life(ready_after_s=1))
    watch = await watched(tree(a, b, child("c"), strategy=REST), 9)
    assert watch.starts() == ["0 a", "0 b", "0 c", "2 a", "3 b", "3 c"]
    assert watch.lines(ChildEventKind.STOPPING)[:2] == ["1 t/c STOPPING", "2 t/b STOPPING"]  # b was ended in mid-start
    assert watch.waits() == [0, 0]  # and that was no failure of its own


async def test_a_start_does_not_wait_in_vain_for_one_that_has_failed(autojump_clock: trio.testing.MockClock) -> None:
    a, b = child("a", Life(lasts_s=1)), child("b", Life(ready_after_s=500), start_within_s=600)
    watch = await watched(tree(a, b, strategy=REST), 9)
    assert watch.starts() == ["0 a", "1 a", "1 b"]


async def test_a_start_goes_on_though_one_before_it_has_done_its_work(autojump_clock: trio.testing.MockClock) -> None:
    a = child("a", Life(lasts_s=1, error=None), restart=TRANSIENT)
    b = child("b", Life(lasts_s=2), restart=TEMPORARY)
    watch = await watched(tree(a, b, child("c", Life(ready_after_s=4)), strategy=REST), 9)
    assert watch.starts() == ["0 a", "0 b", "4 c"]


# Restart types -------------------------------------------------------------------------


async def test_a_permanent_child_is_restarted_even_when_it_ends_well(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a", Life(lasts_s=1, error=None))), 5)
    assert watch.lines()[2:6] == ["1 t/a ENDED", "1 t/a RESTARTING", "1 t/a STARTING", "1 t/a STARTED"]


async def test_a_transient_child_is_restarted_only_after_an_error(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(child("a", Life(lasts_s=1), Life(lasts_s=1, error=None), restart=TRANSIENT)), 5)
    assert watch.lines() == [
        "0 t/a STARTING",
        "0 t/a STARTED",
        "1 t/a FAILED",
        "1 t/a RESTARTING",
        "1 t/a STARTING",
        "1 t/a STARTED",
        "2 t/a ENDED",
    ]


async def test_a_transient_child_that_is_done_runs_again_with_its_group(autojump_clock: trio.testing.MockClock) -> None:
    a = child("a", Life(lasts_s=1, error=None), restart=TRANSIENT)
    watch = await watched(tree(a, child("b", Life(lasts_s=2)), strategy=ALL), 5)
    assert watch.starts() == ["0 a", "0 b", "2 a", "2 b"]


async def test_a_temporary_child_is_never_restarted(autojump_clock: trio.testing.MockClock) -> None:
    a = child("a", Life(lasts_s=1), restart=TEMPORARY)
    b = child("b", Life(lasts_s=2), restart=TEMPORARY)
    c = child("c", Life(lasts_s=3))
    watch = await watched(tree(a, b, c, child("d", restart=TEMPORARY), strategy=ALL, restarts_max=1), 5)
    assert watch.starts() == ["0 a", "0 b", "0 c", "0 d", "3 c"]
    assert watch.stops() == ["3 d", "5 c"]


# Intensity -----------------------------------------------------------------------------


def fails_every(seconds: int, name: str = "a", **fields) -> Child:
    return child(name, *[Life(lasts_s=seconds)] * 99, **fields)


async def test_one_failure_too_many_ends_the_tree(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RestartsExceeded) as caught:  # and no group is around it
        await watched(tree(fails_every(1), restarts_max=3, restarts_window_s=30))
    assert trio.current_time() == 4
    assert str(caught.value) == "too many failures (4 within 30 s), the last that of t/a: ValueError: it broke"
    assert isinstance(caught.value.__cause__, ValueError)


async def test_the_window_is_closed_at_both_ends(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RestartsExceeded):
        await watched(tree(fails_every(10), restarts_max=3, restarts_window_s=30))
    assert trio.current_time() == 40
    await watched(tree(fails_every(10), restarts_max=3, restarts_window_s=29.9), 60)


async def test_old_failures_do_not_hide_new_ones(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RestartsExceeded):
        await watched(tree(child("a", Life(lasts_s=1), Life(lasts_s=39), Life(lasts_s=5)), restarts_max=1))
    assert trio.current_time() == 45


async def test_slow_failures_are_forgiven(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(fails_every(20), restarts_max=3, restarts_window_s=30), 1000)
    assert len(watch.starts()) == 50


async def test_no_restart_at_all_may_be_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RestartsExceeded):
        await watched(tree(fails_every(7), restarts_max=0))
    assert trio.current_time() == 7


async def test_failures_of_all_children_count_together(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(RestartsExceeded):
        await watched(tree(fails_every(2), fails_every(3, "b"), restarts_max=3))
    assert trio.current_time() == 6


async def test_a_child_that_dies_as_soon_as_it_is_ready_does_not_spin_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def run(*, task_status: trio.TaskStatus[None]):
        task_status.started()
        raise KeyError("at once")

    watch = Watch()
    with pytest.raises(RestartsExceeded):
        await watched(tree(child("a"), Child(name="b", run=run), restarts_max=2), watch=watch)
    assert trio.current_time() == 0
    assert watch.starts() == ["0 a", "0 b", "0 b", "0 b"]
    assert watch.lines()[-4:] == ["0 t/b FAILED", "0 t GAVE_UP", "0 t/a STOPPING", "0 t/a STOPPED"]


async def test_restarts_multiply_over_the_levels(autojump_clock: trio.testing.MockClock) -> None:
    inner = tree(fails_every(1), name="inner", restarts_max=3)
    watch = Watch()
    with pytest.raises(RestartsExceeded) as caught:
        await watched(tree(inner, restarts_max=2, restarts_window_s=60), watch=watch)
    assert trio.current_time() == 12
    assert len(watch.lines(ChildEventKind.STARTED)) == 12 + 3
    assert watch.lines(ChildEventKind.GAVE_UP) == [
        "4 t/inner GAVE_UP",
        "8 t/inner GAVE_UP",
        "12 t/inner GAVE_UP",
        "12 t GAVE_UP",
    ]
    assert str(caught.value) == (
        "too many failures (3 within 60 s), the last that of t/inner: "
        "too many failures (4 within 30 s), the last that of t/inner/a: ValueError: it broke"
    )


async def test_a_nested_tree_that_gives_up_is_one_failure_of_its_parent(autojump_clock: trio.testing.MockClock) -> None:
    slow = Life(cleans_up_s=2)
    inner = tree(child("a", slow), child("b", Life(lasts_s=1)), name="inner", restarts_max=0)
    watch = await watched(tree(inner, child("z", slow), strategy=REST), 10)
    assert watch.lines()[8:18] == [
        "1 t/inner/b FAILED",
        "1 t/inner GAVE_UP",
        "1 t/inner/a STOPPING",
        "3 t/inner/a STOPPED",
        "3 t/inner FAILED",
        "3 t/inner RESTARTING",
        "3 t/z STOPPING",
        "5 t/z STOPPED",
        "5 t/inner STARTING",
        "5 t/inner/a STARTING",
    ]
    assert watch.starts()[4:] == ["5 a", "5 b", "5 inner", "5 z"]


# Starts that fail ----------------------------------------------------------------------


async def test_a_first_start_that_fails_stops_what_runs_and_reaches_the_operator(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = Watch()
    bad = evolve(child("bad", FAILS_TO_START), restart=TEMPORARY)  # whatever its restart type
    with pytest.raises(StartFailed) as caught:
        await watched(tree(child("a"), bad, child("c")), watch=watch)
    assert str(caught.value) == "t/bad could not start: OSError: no device"
    assert isinstance(caught.value.__cause__, OSError)
    assert watch.lines()[2:] == ["0 t/bad STARTING", "0 t/bad FAILED", "0 t/a STOPPING", "0 t/a STOPPED"]


async def test_what_a_child_says_about_its_start_passes_through_every_level(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sentence = StartFailed("Port 8000 is taken; choose another.")

    async def run(*, task_status):
        raise sentence

    with pytest.raises(StartFailed) as caught:
        await watched(tree(tree(Child(name="a", run=run), name="inner")))
    assert caught.value is sentence
    assert caught.value.__cause__ is None


async def test_what_a_group_of_errors_says_is_said_and_the_group_is_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def run(*, task_status):
        raise ExceptionGroup("two", [EngineDied("It exited with 1."), OSError("no device")])

    with pytest.raises(StartFailed) as caught:
        await watched(tree(Child(name="a", run=run)))
    assert str(caught.value) == "t/a could not start: It exited with 1. | OSError: no device"
    assert isinstance(caught.value.__cause__, ExceptionGroup)


async def test_a_start_that_takes_too_long_has_failed(autojump_clock: trio.testing.MockClock) -> None:
    watch = Watch()
    slow = child("b", Life(ready_after_s=5, cleans_up_s=1), start_within_s=3)
    with pytest.raises(StartFailed) as caught:
        await watched(tree(child("a"), slow), watch=watch)
    assert str(caught.value) == "t/b was not ready within 3 s."
    assert watch.lines()[2:] == [
        "0 t/b STARTING",
        "3 t/b FAILED",
        "3 t/b STOPPING",
        "4 t/b STOPPED",
        "4 t/a STOPPING",
        "4 t/a STOPPED",
    ]


async def test_ready_just_in_time_is_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """In the same instant either may come first; what must not happen is that the start hangs."""
    try:
        await watched(tree(child("a", Life(ready_after_s=3), start_within_s=3)), 9)
    except StartFailed:
        assert trio.current_time() == 3
    else:
        assert trio.current_time() == 9


async def test_a_child_that_ends_before_it_is_ready_has_failed_to_start(autojump_clock: trio.testing.MockClock) -> None:
    async def run(*, task_status) -> None:
        await trio.sleep(1)

    with pytest.raises(StartFailed, match=r"^t/a ended before it was ready\.$"):
        await watched(tree(Child(name="a", run=run, restart=TRANSIENT)))


async def test_a_nested_tree_that_gives_up_before_it_is_up_has_failed_to_start(
    autojump_clock: trio.testing.MockClock,
) -> None:
    inner = tree(fails_every(1), child("b", Life(ready_after_s=4)), name="inner", restarts_max=0)
    with pytest.raises(StartFailed) as caught:
        await watched(tree(inner))
    assert str(caught.value) == (
        "t/inner could not start: too many failures (1 within 30 s), the last that of t/inner/a: ValueError: it broke"
    )


def restarting(*lives: Life, **fields: int) -> Child:
    """A child that fails after 1 s and then lives the given lives."""
    return child("a", Life(lasts_s=1), *lives, **fields)


async def test_failed_starts_during_a_restart_are_retried_with_growing_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backoff = Backoff(min_s=1, max_s=5, jitter=0.5, reset_after_s=60)
    value = tree(restarting(*[FAILS_TO_START] * 4), restarts_max=5, backoff=backoff)
    watch = await watched(value, 60, Chances(0, 0.5, 1, 0.2))
    assert watch.waits() == [0, 1, 2 * 1.25, 4 * 1.5, 5 * 1.1]
    assert watch.starts() == ["0 a", "16 a"]  # 1 + 1 + 2.5 + 6 + 5.5


async def test_each_failed_start_counts_as_a_failure(autojump_clock: trio.testing.MockClock) -> None:
    backoff = Backoff(min_s=1, max_s=5, jitter=0, reset_after_s=60)
    with pytest.raises(RestartsExceeded) as caught:
        await watched(tree(restarting(*[FAILS_TO_START] * 4), restarts_max=3, backoff=backoff))
    assert trio.current_time() == 1 + 1 + 2
    assert str(caught.value) == "too many failures (4 within 30 s), the last that of t/a: OSError: no device"


async def test_starts_that_are_too_slow_during_a_restart_are_retried_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    value = tree(restarting(Life(ready_after_s=9, cleans_up_s=2), start_within_s=4), backoff=Backoff(min_s=1, jitter=0))
    watch = await watched(value, 30)
    assert watch.lines()[2:-2] == [
        "1 t/a FAILED",
        "1 t/a RESTARTING",
        "1 t/a STARTING",
        "5 t/a FAILED",
        "5 t/a STOPPING",
        "7 t/a STOPPED",
        "7 t/a RESTARTING",
        "8 t/a STARTING",
        "8 t/a STARTED",
    ]


async def test_a_slow_start_that_does_not_stop_either_counts_once(autojump_clock: trio.testing.MockClock) -> None:
    deaf = Life(ready_after_s=9, cleans_up_s=9)
    value = tree(restarting(deaf, start_within_s=4, stop_within_s=2), backoff=Backoff(min_s=1, jitter=0))
    watch = await watched(value, 30)
    assert watch.waits() == [0, 1]
    assert watch.starts() == ["0 a", "14 a"]


@pytest.mark.parametrize(("up_s", "wait_s"), [(9.9, 2), (10, 1)])
async def test_the_back_off_begins_anew_after_a_quiet_time(
    autojump_clock: trio.testing.MockClock, up_s: float, wait_s: int
) -> None:
    lives = FAILS_TO_START, Life(lasts_s=up_s), FAILS_TO_START
    value = tree(restarting(*lives), restarts_max=4, backoff=Backoff(min_s=1, jitter=0, reset_after_s=10))
    watch = await watched(value, 100)
    assert watch.waits() == [0, 1, 0, wait_s]


async def test_time_spent_starting_or_waiting_is_not_quiet(autojump_clock: trio.testing.MockClock) -> None:
    slow = Life(ready_after_s=20, starts=False)
    backoff = Backoff(min_s=12, max_s=100, jitter=0, reset_after_s=10)
    value = tree(restarting(slow, slow, slow, start_within_s=30), backoff=backoff)
    assert (await watched(value, 300)).waits() == [0, 12, 24, 48]


async def test_a_back_off_may_go_on_for_ever(autojump_clock: trio.testing.MockClock, unlogged: None) -> None:
    backoff = Backoff(min_s=1, max_s=40, jitter=0)
    value = tree(restarting(*[FAILS_TO_START] * 1100), restarts_max=9, restarts_window_s=60, backoff=backoff)
    watch = await watched(value, 100_000)
    assert watch.waits()[-1] == 40
    assert len(watch.starts()) == 2


async def test_a_cancel_interrupts_the_back_off_at_once(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(restarting(FAILS_TO_START), child("b"), backoff=Backoff(min_s=30)), 11)
    assert trio.current_time() == 11
    assert watch.lines()[-3:] == ["1 t/a RESTARTING", "11 t/b STOPPING", "11 t/b STOPPED"]


async def test_a_cancel_interrupts_a_start_during_a_restart_at_once(autojump_clock: trio.testing.MockClock) -> None:
    watch = await watched(tree(restarting(Life(ready_after_s=50), start_within_s=100), child("b")), 11)
    assert watch.lines()[-4:] == ["11 t/b STOPPING", "11 t/b STOPPED", "11 t/a STOPPING", "11 t/a STOPPED"]


async def test_a_cancel_during_the_stop_of_a_group_goes_on_with_it(autojump_clock: trio.testing.MockClock) -> None:
    c = child("c", Life(cleans_up_s=4))
    watch = await watched(tree(child("a"), child("b", Life(lasts_s=1)), c, strategy=REST), 2)
    assert watch.starts() == ["0 a", "0 b", "0 c"]
    assert watch.stops() == ["5 c", "5 a"]


async def test_others_are_restarted_while_one_waits_in_its_back_off(autojump_clock: trio.testing.MockClock) -> None:
    b = child("b", Life(lasts_s=5))
    watch = await watched(tree(restarting(FAILS_TO_START), b, backoff=Backoff(min_s=10, jitter=0)), 20)
    assert watch.starts() == ["0 a", "0 b", "5 b", "11 a"]


async def test_the_rest_waits_with_the_one_that_could_not_start(autojump_clock: trio.testing.MockClock) -> None:
    value = tree(child("z"), restarting(FAILS_TO_START), child("c"), strategy=REST, backoff=Backoff(min_s=10, jitter=0))
    watch = await watched(value, 20)
    assert watch.starts() == ["0 z", "0 a", "0 c", "11 a", "11 c"]


async def test_all_wait_together_where_all_restart_together(autojump_clock: trio.testing.MockClock) -> None:
    value = tree(child("z"), restarting(FAILS_TO_START), child("c"), strategy=ALL, backoff=Backoff(min_s=10, jitter=0))
    watch = await watched(value, 20)
    assert watch.starts() == ["0 z", "0 a", "0 c", "1 z", "11 z", "11 a", "11 c"]


async def test_an_earlier_failure_does_not_shorten_the_wait_of_a_later_child(
    autojump_clock: trio.testing.MockClock,
) -> None:
    value = tree(
        child("z", Life(lasts_s=4)), restarting(FAILS_TO_START), strategy=REST, backoff=Backoff(min_s=10, jitter=0)
    )
    watch = await watched(value, 20)
    assert watch.starts() == ["0 z", "0 a", "4 z", "11 a"]


async def test_a_nested_tree_that_cannot_come_up_again_is_retried_by_its_parent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a = child("a", Life(lasts_s=1), FAILS_TO_START, Life(), Life())
    inner = tree(child("y"), a, name="inner", restarts_max=0)
    watch = await watched(tree(inner, backoff=Backoff(min_s=3, jitter=0)), 20)
    assert watch.lines(ChildEventKind.RESTARTING, ChildEventKind.GAVE_UP) == [
        "1 t/inner GAVE_UP",
        "1 t/inner RESTARTING",
        "1 t/inner RESTARTING",
    ]
    assert watch.waits() == [0, 3]
    assert watch.starts() == ["0 y", "0 a", "0 inner", "1 y", "4 y", "4 a", "4 inner"]


# What cannot be stopped, and what can go wrong besides ----------------------------------


async def test_a_child_that_ignores_its_cancellation_is_reported_and_left_behind(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = child("deaf", Life(cleans_up_s=9), stop_within_s=2)
    watch = await watched(tree(child("a"), tree(deaf, name="inner"), child("z", Life(cleans_up_s=1))), 1)
    assert watch.lines()[8:] == [
        "1 t/z STOPPING",
        "2 t/z STOPPED",
        "2 t/inner STOPPING",
        "2 t/inner/deaf STOPPING",
        "4 t/inner/deaf IGNORES_CANCEL",
        "4 t/a STOPPING",
        "4 t/a STOPPED",
        "11 t/inner/deaf STOPPED",
        "11 t/inner STOPPED",
    ]
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.getMessage() == "t/inner/deaf does not stop, and a task cannot be killed"


@pytest.mark.parametrize("attempt", range(8))  # Trio wakes two tasks of one instant in any order
async def test_a_tree_in_which_all_has_ended_late_is_waited_for(
    autojump_clock: trio.testing.MockClock, attempt: int
) -> None:
    slow = child("slow", Life(cleans_up_s=2.5))
    inner = tree(slow, child("deaf", Life(cleans_up_s=3), stop_within_s=2), name="inner")
    watch = await watched(tree(child("a"), inner), 1)
    assert watch.lines()[-7:] == [
        "3 t/inner/deaf IGNORES_CANCEL",
        "3 t/inner/slow STOPPING",
        "4 t/inner/deaf STOPPED",
        "5.5 t/inner/slow STOPPED",
        "5.5 t/inner STOPPED",
        "5.5 t/a STOPPING",
        "5.5 t/a STOPPED",
    ]


async def test_a_start_that_ignores_its_cancellation_is_reported_too(autojump_clock: trio.testing.MockClock) -> None:
    deaf = child("deaf", Life(ready_after_s=100, cleans_up_s=9), start_within_s=3, stop_within_s=2)
    watch = await watched(tree(child("a"), deaf), 1)
    assert watch.lines()[3:] == [
        "1 t/deaf STOPPING",
        "3 t/deaf IGNORES_CANCEL",
        "3 t/a STOPPING",
        "3 t/a STOPPED",
        "10 t/deaf STOPPED",
    ]


async def test_a_deadline_is_not_granted_twice(autojump_clock: trio.testing.MockClock) -> None:
    """The tree is cancelled while it already waits for the child."""
    deaf = child("deaf", Life(cleans_up_s=9), stop_within_s=4)
    watch = await watched(tree(child("a"), child("b", Life(lasts_s=1)), deaf, strategy=REST), 2)
    assert watch.lines(ChildEventKind.IGNORES_CANCEL) == ["5 t/deaf IGNORES_CANCEL"]


async def test_no_second_life_begins_beside_one_that_does_not_end(autojump_clock: trio.testing.MockClock) -> None:
    deaf = child("deaf", Life(cleans_up_s=9), stop_within_s=2)
    value = tree(child("b", Life(lasts_s=1), Life(lasts_s=4)), deaf, child("z"), strategy=REST)
    watch = await watched(value, 20)
    assert watch.starts() == ["0 b", "0 deaf", "0 z", "3 b", "7 b", "10 deaf", "10 z"]
    assert watch.lines(ChildEventKind.IGNORES_CANCEL) == [
        "3 t/deaf IGNORES_CANCEL"
    ]  # once, though it was asked again at 7


async def test_whoever_watches_cannot_bring_the_tree_down(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def watch(happening):
        raise ZeroDivisionError

    await watched(tree(child("a", Life(lasts_s=1)), child("b")), 5, watch=watch)
    assert trio.current_time() == 5
    assert "an observer of the tree failed at: t/b has stopped" in caplog.text


async def test_a_bug_is_logged_with_its_traceback_and_what_was_meant_without(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = child("a", Life(lasts_s=1)), child("b", Life(lasts_s=2, error=EngineDied("It exited with 1.")))
    await watched(tree(a, b), 3)
    failed = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in failed] == [
        "t/a has failed: ValueError: it broke",
        "t/b has failed: It exited with 1.",
    ]
    assert [bool(record.exc_info) for record in failed] == [True, False]


async def test_started_twice_is_a_bug_of_the_child(autojump_clock: trio.testing.MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        task_status.started()

    with pytest.raises(RestartsExceeded, match=r"RuntimeError: t/a called started\(\) a second time"):
        await watched(tree(Child(name="a", run=run)))


async def test_what_is_no_exception_ends_everything_in_order(autojump_clock: trio.testing.MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep(1)
        raise KeyboardInterrupt

    watch = Watch()
    value = tree(child("a"), tree(child("y"), Child(name="b", run=run), child("z"), name="inner"), child("c"))
    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
        await watched(value, watch=watch)
    assert watch.stops() == ["1 z", "1 y", "1 c", "1 a"]


# Significant children ------------------------------------------------------------------


async def test_the_good_end_of_a_significant_child_is_that_of_its_tree(autojump_clock: trio.testing.MockClock) -> None:
    job = child("job", Life(lasts_s=1), Life(lasts_s=2, error=None), restart=TRANSIENT, significant=True)
    inner = tree(child("server", Life(cleans_up_s=1)), job, name="inner", restart=TEMPORARY, significant=True)
    watch = await watched(tree(child("a"), inner))
    assert trio.current_time() == 4  # nobody cancelled it
    assert watch.lines()[-6:] == [
        "3 t/inner/job ENDED",
        "3 t/inner/server STOPPING",
        "4 t/inner/server STOPPED",
        "4 t/inner ENDED",
        "4 t/a STOPPING",
        "4 t/a STOPPED",
    ]


async def test_a_significant_child_may_be_done_before_its_tree_is_up(autojump_clock: trio.testing.MockClock) -> None:
    job = child("job", Life(lasts_s=1, error=None), restart=TRANSIENT, significant=True)
    inner = tree(job, child("slow", Life(ready_after_s=3)), child("never"), name="inner", restart=TRANSIENT)
    watch = await watched(tree(inner), 9)
    assert watch.lines()[-6:] == [
        "0 t/inner/slow STARTING",
        "1 t/inner/job ENDED",
        "1 t/inner STARTED",
        "1 t/inner/slow STOPPING",
        "1 t/inner/slow STOPPED",
        "1 t/inner ENDED",
    ]


async def test_work_that_is_done_counts_more_than_a_failure_in_the_same_instant(
    autojump_clock: trio.testing.MockClock,
) -> None:
    job = child("job", Life(lasts_s=1, error=None), restart=TRANSIENT, significant=True)
    await watched(tree(child("a", Life(lasts_s=1)), job, strategy=ALL, restarts_max=0))
    assert trio.current_time() == 1


# The value -----------------------------------------------------------------------------


async def actor(inbox, slots, *, task_status): ...


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: child(""), "'' is no name for a child: paths are made of names and slashes."),
        (lambda: tree(name="a/b"), "'a/b' is no name for a child: paths are made of names and slashes."),
        (lambda: tree(child("a"), child("b"), child("a")), "t: two children have the same name: a, b, a."),
        (lambda: child("a", start_within_s=0), "a: start_within_s is 0, but must be more than 0 and finite."),
        (lambda: child("a", stop_within_s=inf), "a: stop_within_s is inf, but must be more than 0 and finite."),
        (lambda: tree(restarts_window_s=inf - inf), "t: restarts_window_s is nan, but must be more than 0 and finite."),
        (lambda: tree(restarts_max=-1), "t: restarts_max is -1, but must not be negative."),
        (lambda: child("a", limits=(("x", 1), ("x", 2))), "a: two limits have the same name: x, x."),
        (lambda: child("a", significant=True), "a: a significant child ends its tree, so it cannot be permanent."),
        (lambda: tree(significant=True), "t: a significant child ends its tree, so it cannot be permanent."),
        (
            lambda: Child(name="a", run=actor, args=(1,)),
            "a: its function does not fit its 1 args: missing a required argument: 'slots'.",
        ),
        (lambda: Backoff(min_s=0), "the back-off: min_s is 0, but must be more than 0 and finite."),
        (lambda: Backoff(reset_after_s=-1), "the back-off: reset_after_s is -1, but must be more than 0 and finite."),
        (lambda: Backoff(min_s=9, max_s=3), "the back-off: min_s is 9, more than max_s, 3."),
        (lambda: Backoff(jitter=1.5), "the back-off: jitter is 1.5, but must be from 0 to 1."),
    ],
)
def test_a_tree_that_makes_no_sense_cannot_be_made(make: Callable[[], Child | Tree | Backoff], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_tree_may_take_as_long_to_stop_as_its_children() -> None:
    inner = tree(child("a", stop_within_s=2), child("b", stop_within_s=30), name="inner")
    assert tree(inner, child("c", stop_within_s=1)).stop_within_s == 33


def test_a_happening_reads_as_a_sentence() -> None:
    assert str(ChildEvent("n/a", ChildEventKind.STARTED, 1.0)) == "n/a is ready"
    assert (
        str(ChildEvent("n/a", ChildEventKind.RESTARTING, 1.0, wait_s=1.23456)) == "n/a will be started again in 1.23 s"
    )
    assert str(ChildEvent("n/a", ChildEventKind.FAILED, 1.0, KeyError("x"))) == "n/a has failed: KeyError: 'x'"


def test_a_tree_is_printed_with_all_its_policies_and_limits() -> None:
    engine = Child(
        name="engine",
        run=actor,
        args=(1, 2),
        start_within_s=600,
        stop_within_s=15,
        limits=(("slots", 16), ("kv_tokens", 20480)),
        about="SGLang on the CPU",
    )
    value = tree(
        child(
            "gateway",
            about="HTTP and WebSocket on 127.0.0.1:8000",
            limits=(
                ("connections", 1024),
                ("requests", 256),
                ("backlog_bytes", 1048576),
                ("body_bytes", 33554432),
                ("admit_within_s", 0.25),
            ),
        ),
        tree(
            engine,
            child("decode", limits=(("inbox", 16),)),
            name="tiny-0",
            about="one engine and the actor that feeds it",
            strategy=REST,
            restarts_max=5,
            restarts_window_s=300,
        ),
        child("load", restart=TRANSIENT, significant=True),
        name="quickstart",
        about="one machine, one tiny model",
    )
    assert render(value).splitlines() == [
        "quickstart    one machine, one tiny model",
        "│             stops within 30 s",
        "│             one for one · at most 3 restarts in 30 s · failed starts wait 0.5 to 30 s",
        "├─ gateway    HTTP and WebSocket on 127.0.0.1:8000",
        "│             permanent · starts within 5 s · stops within 5 s",
        "│             connections 1,024 · requests 256 · backlog_bytes 1,048,576 · body_bytes 33,554,432 ·",
        "│             admit_within_s 0.25",
        "├─ tiny-0     one engine and the actor that feeds it",
        "│  │          permanent · stops within 20 s",
        "│  │          rest for one · at most 5 restarts in 300 s · failed starts wait 0.5 to 30 s",
        "│  ├─ engine  SGLang on the CPU",
        "│  │          permanent · starts within 600 s · stops within 15 s",
        "│  │          slots 16 · kv_tokens 20,480",
        "│  └─ decode  permanent · starts within 5 s · stops within 5 s",
        "│             inbox 16",
        "└─ load       transient · significant · starts within 5 s · stops within 5 s",
    ]
