"""Supervision in virtual time: starts, stops, strategies and restart types; every time is exact."""

from __future__ import annotations

import logging
from functools import partial
from typing import NoReturn

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import EngineDied
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.supervise import RestartsExceeded, supervise
from supervisor.supervision.tree import Child, Strategy
from tests.rig.supervision import (
    ALL,
    REST,
    TEMPORARY,
    TRANSIENT,
    Chances,
    EventLog,
    Life,
    child,
    listed,
    supervised,
    tree,
)

# Starting and stopping -----------------------------------------------------------------


async def test_children_start_in_order_and_stop_in_reverse(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a"), child("b"), child("c")), 1)
    assert events.lines() == listed(
        "0 t/a STARTING, 0 t/a STARTED, 0 t/b STARTING, 0 t/b STARTED, 0 t/c STARTING, 0 t/c STARTED",
        "1 t/c STOPPING, 1 t/c STOPPED, 1 t/b STOPPING, 1 t/b STOPPED, 1 t/a STOPPING, 1 t/a STOPPED",
    )


async def test_a_start_waits_until_the_one_before_is_ready(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a", Life(ready_after_s=2)), child("b", Life(ready_after_s=3)), child("c")), 9)
    assert events.starts() == ["2 a", "5 b", "5 c"]


async def test_a_tree_is_ready_when_its_last_child_is(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    inner = tree(child("b", Life(ready_after_s=4)), child("c", Life(ready_after_s=4)), name="inner")
    value = tree(child("a", Life(ready_after_s=2)), inner)
    await nursery.start(partial(supervise, value, rng=Chances()))
    assert trio.current_time() == 10  # inside a tree each child has its own time


async def test_a_child_gets_its_args_and_may_pass_any_value_to_started(autojump_clock: MockClock) -> None:
    got = []

    async def run(*args: object, task_status: trio.TaskStatus[list[str]]) -> None:
        got.append(args)
        task_status.started(["a listener"])
        await trio.sleep_forever()

    await supervised(tree(Child(name="a", run=run, args=(1, "two"))), 1)
    assert got == [(1, "two")]


async def test_nested_trees_stop_in_reverse_as_well(autojump_clock: MockClock) -> None:
    slow = Life(cleans_up_s=1)
    inner = tree(child("b", slow), child("c", slow), name="inner")
    events = await supervised(tree(child("a", slow), inner, child("d", slow)), 1)
    assert events.starts() == ["0 a", "0 b", "0 c", "0 inner", "0 d"]
    assert events.stops() == ["2 d", "3 c", "4 b", "4 inner", "5 a"]


async def test_a_cancel_during_a_start_ends_it_at_once_and_stops_the_rest(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a"), child("b", Life(ready_after_s=50), start_within_s=100), child("c")), 2)
    assert events.lines()[2:] == listed("0 t/b STARTING, 2 t/b STOPPING, 2 t/b STOPPED, 2 t/a STOPPING, 2 t/a STOPPED")


async def test_a_start_that_cleans_up_slowly_delays_the_stop_of_the_others(autojump_clock: MockClock) -> None:
    events = await supervised(
        tree(child("a"), child("b", Life(ready_after_s=50, cleans_up_s=3), start_within_s=100)), 2
    )
    assert events.stops() == ["5 b", "5 a"]


async def test_a_tree_that_is_cancelled_before_it_runs_starts_nothing(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a")), 0)
    assert events.lines() == []


async def test_a_child_that_is_ready_after_its_cancellation_does_not_count_as_started(
    autojump_clock: MockClock,
) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(3)
        task_status.started()
        await trio.sleep_forever()

    events = await supervised(tree(Child(name="a", run=run)), 2)
    assert events.lines() == ["0 t/a STARTING", "2 t/a STOPPING", "3 t/a STOPPED"]


async def test_an_error_during_a_stop_is_logged_and_the_others_stop_all_the_same(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("in its clean-up")

    events = await supervised(tree(child("a"), Child(name="b", run=run)), 1)
    assert events.stops() == ["1 b", "1 a"]
    assert repr(events.all[-3].error) == "KeyError('in its clean-up')"
    assert "KeyError: 'in its clean-up'" in caplog.text


# Strategies ----------------------------------------------------------------------------


async def test_one_for_one_restarts_only_the_one_that_failed(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a"), child("b", Life(lasts_s=1)), child("c")), 5)
    assert events.lines()[6:-6] == listed("1 t/b FAILED, 1 t/b RESTARTING, 1 t/b STARTING, 1 t/b STARTED")


async def test_rest_for_one_restarts_those_after_it_too(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a"), child("b", Life(lasts_s=1)), child("c"), child("d"), strategy=REST), 5)
    assert events.lines()[8:-8] == listed(
        "1 t/b FAILED, 1 t/b RESTARTING, 1 t/d STOPPING, 1 t/d STOPPED, 1 t/c STOPPING, 1 t/c STOPPED",
        "1 t/b STARTING, 1 t/b STARTED, 1 t/c STARTING, 1 t/c STARTED, 1 t/d STARTING, 1 t/d STARTED",
    )


async def test_one_for_all_restarts_all(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a"), child("b", Life(lasts_s=1)), child("c"), strategy=ALL), 5)
    assert events.lines()[6:-6] == listed(
        "1 t/b FAILED, 1 t/b RESTARTING, 1 t/c STOPPING, 1 t/c STOPPED, 1 t/a STOPPING, 1 t/a STOPPED",
        "1 t/a STARTING, 1 t/a STARTED, 1 t/b STARTING, 1 t/b STARTED, 1 t/c STARTING, 1 t/c STARTED",
    )


@pytest.mark.parametrize("strategy", [REST, ALL])
async def test_nothing_is_restarted_before_the_last_of_the_group_has_cleaned_up(
    autojump_clock: MockClock, strategy: Strategy
) -> None:
    events = await supervised(tree(child("b", Life(lasts_s=1)), child("c", Life(cleans_up_s=2)), strategy=strategy), 5)
    assert events.starts() == ["0 b", "0 c", "3 b", "3 c"]


async def test_a_failure_of_a_later_child_while_it_is_stopped_does_not_count(autojump_clock: MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # only a test may
            raise KeyError("torn off") from None

    b, c = child("b", Life(lasts_s=1)), Child(name="c", run=run)
    events = await supervised(tree(b, c, strategy=REST, restarts_max=1), 5)
    assert events.starts() == ["0 b", "0 c", "1 b", "1 c"]
    assert len(events.lines(ChildEventKind.RESTARTING)) == 1


@pytest.mark.parametrize("strategy", [REST, ALL])
@pytest.mark.parametrize("c_lasts_s", [1, 2])
async def test_a_failure_together_with_that_of_a_needed_child_does_not_count(
    autojump_clock: MockClock, strategy: Strategy, c_lasts_s: int
) -> None:
    """It fell in the same instant, or while the group was being stopped."""
    a = child("a", Life(lasts_s=1))
    c = child("c", Life(lasts_s=c_lasts_s))
    d = child("d", Life(cleans_up_s=2))
    events = await supervised(tree(a, c, d, strategy=strategy, restarts_max=1), 9)
    assert events.starts() == ["0 a", "0 c", "0 d", "3 a", "3 c", "3 d"]
    assert events.lines(ChildEventKind.RESTARTING) == ["1 t/a RESTARTING"]


async def test_two_failures_of_one_instant_restart_both_and_count_twice(autojump_clock: MockClock) -> None:
    pair = child("a", Life(lasts_s=1)), child("b", Life(lasts_s=1))
    events = await supervised(tree(*pair, restarts_max=2), 5)
    assert events.starts()[:2] == ["0 a", "0 b"]
    assert sorted(events.starts()[2:]) == ["1 a", "1 b"]  # beside each other
    pair = child("a", Life(lasts_s=1)), child("b", Life(lasts_s=1))
    with pytest.raises(RestartsExceeded):
        await supervised(tree(*pair, restarts_max=1))


async def test_the_end_of_an_earlier_child_during_a_restart_of_the_rest_restarts_them_again(
    autojump_clock: MockClock,
) -> None:
    a = child("a", Life(lasts_s=2))
    b = child("b", Life(lasts_s=1), Life(ready_after_s=4), Life(ready_after_s=1))
    events = await supervised(tree(a, b, child("c"), strategy=REST), 9)
    assert events.starts() == ["0 a", "0 b", "0 c", "2 a", "3 b", "3 c"]
    assert events.lines(ChildEventKind.STOPPING)[:2] == ["1 t/c STOPPING", "2 t/b STOPPING"]  # b was ended in mid-start
    assert events.waits() == [0, 0]  # and that was no failure of its own


async def test_a_start_ends_when_a_child_before_it_fails(autojump_clock: MockClock) -> None:
    a, b = child("a", Life(lasts_s=1)), child("b", Life(ready_after_s=500), start_within_s=600)
    events = await supervised(tree(a, b, strategy=REST), 9)
    assert events.starts() == ["0 a", "1 a", "1 b"]


async def test_a_start_goes_on_though_a_child_before_it_has_ended_well(autojump_clock: MockClock) -> None:
    a = child("a", Life(lasts_s=1, error=None), restart=TRANSIENT)
    b = child("b", Life(lasts_s=2), restart=TEMPORARY)
    events = await supervised(tree(a, b, child("c", Life(ready_after_s=4)), strategy=REST), 9)
    assert events.starts() == ["0 a", "0 b", "4 c"]


# Restart types -------------------------------------------------------------------------


async def test_a_permanent_child_is_restarted_even_when_it_ends_well(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a", Life(lasts_s=1, error=None))), 5)
    assert events.lines()[2:6] == ["1 t/a ENDED", "1 t/a RESTARTING", "1 t/a STARTING", "1 t/a STARTED"]


async def test_a_transient_child_is_restarted_only_after_an_error(autojump_clock: MockClock) -> None:
    events = await supervised(tree(child("a", Life(lasts_s=1), Life(lasts_s=1, error=None), restart=TRANSIENT)), 5)
    assert events.lines() == listed(
        "0 t/a STARTING, 0 t/a STARTED, 1 t/a FAILED, 1 t/a RESTARTING, 1 t/a STARTING, 1 t/a STARTED, 2 t/a ENDED"
    )


async def test_a_transient_child_that_is_done_runs_again_with_its_group(autojump_clock: MockClock) -> None:
    a = child("a", Life(lasts_s=1, error=None), restart=TRANSIENT)
    events = await supervised(tree(a, child("b", Life(lasts_s=2)), strategy=ALL), 5)
    assert events.starts() == ["0 a", "0 b", "2 a", "2 b"]


async def test_a_temporary_child_is_never_restarted(autojump_clock: MockClock) -> None:
    a = child("a", Life(lasts_s=1), restart=TEMPORARY)
    b = child("b", Life(lasts_s=2), restart=TEMPORARY)
    c = child("c", Life(lasts_s=3))
    events = await supervised(tree(a, b, c, child("d", restart=TEMPORARY), strategy=ALL, restarts_max=1), 5)
    assert events.starts() == ["0 a", "0 b", "0 c", "0 d", "3 c"]
    assert events.stops() == ["3 d", "5 c"]


# What cannot be stopped, and what can go wrong besides ----------------------------------


async def test_a_child_that_ignores_its_cancellation_is_reported_and_left_behind(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    uncancellable = child("deaf", Life(cleans_up_s=9), stop_within_s=2)
    events = await supervised(tree(child("a"), tree(uncancellable, name="inner"), child("z", Life(cleans_up_s=1))), 1)
    assert events.lines()[8:] == listed(
        "1 t/z STOPPING, 2 t/z STOPPED, 2 t/inner STOPPING, 2 t/inner/deaf STOPPING",
        "4 t/inner/deaf IGNORES_CANCEL, 4 t/a STOPPING, 4 t/a STOPPED, 11 t/inner/deaf STOPPED, 11 t/inner STOPPED",
    )
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.getMessage() == "t/inner/deaf does not stop, and a task cannot be killed"


@pytest.mark.parametrize("attempt", range(8))  # Trio wakes two tasks of one instant in any order
async def test_a_tree_whose_children_all_end_late_is_waited_for(autojump_clock: MockClock, attempt: int) -> None:
    slow = child("slow", Life(cleans_up_s=2.5))
    inner = tree(slow, child("deaf", Life(cleans_up_s=3), stop_within_s=2), name="inner")
    events = await supervised(tree(child("a"), inner), 1)
    assert events.lines()[-7:] == listed(
        "3 t/inner/deaf IGNORES_CANCEL, 3 t/inner/slow STOPPING, 4 t/inner/deaf STOPPED, 5.5 t/inner/slow STOPPED",
        "5.5 t/inner STOPPED, 5.5 t/a STOPPING, 5.5 t/a STOPPED",
    )


async def test_a_start_that_ignores_its_cancellation_is_reported_too(autojump_clock: MockClock) -> None:
    uncancellable = child("deaf", Life(ready_after_s=100, cleans_up_s=9), start_within_s=3, stop_within_s=2)
    events = await supervised(tree(child("a"), uncancellable), 1)
    assert events.lines()[3:] == listed(
        "1 t/deaf STOPPING, 3 t/deaf IGNORES_CANCEL, 3 t/a STOPPING, 3 t/a STOPPED, 10 t/deaf STOPPED"
    )


async def test_a_stop_deadline_is_not_extended_by_a_second_stop(autojump_clock: MockClock) -> None:
    """The tree is cancelled while it already waits for the child."""
    uncancellable = child("deaf", Life(cleans_up_s=9), stop_within_s=4)
    events = await supervised(tree(child("a"), child("b", Life(lasts_s=1)), uncancellable, strategy=REST), 2)
    assert events.lines(ChildEventKind.IGNORES_CANCEL) == ["5 t/deaf IGNORES_CANCEL"]


async def test_no_second_life_begins_beside_one_that_does_not_end(autojump_clock: MockClock) -> None:
    uncancellable = child("deaf", Life(cleans_up_s=9), stop_within_s=2)
    value = tree(child("b", Life(lasts_s=1), Life(lasts_s=4)), uncancellable, child("z"), strategy=REST)
    events = await supervised(value, 20)
    assert events.starts() == ["0 b", "0 deaf", "0 z", "3 b", "7 b", "10 deaf", "10 z"]
    assert events.lines(ChildEventKind.IGNORES_CANCEL) == [
        "3 t/deaf IGNORES_CANCEL"
    ]  # once, though it was asked again at 7


async def test_an_observer_that_fails_does_not_end_the_tree(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(EventLog):
        def __call__(self, event: ChildEvent) -> NoReturn:
            raise ZeroDivisionError

    await supervised(tree(child("a", Life(lasts_s=1)), child("b")), 5, events=Fails())
    assert trio.current_time() == 5
    assert "an observer of the tree failed at: t/b has stopped" in caplog.text


async def test_a_bug_is_logged_with_its_traceback_and_an_expected_error_without(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = child("a", Life(lasts_s=1)), child("b", Life(lasts_s=2, error=EngineDied("It exited with 1.")))
    await supervised(tree(a, b), 3)
    failed = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in failed] == [
        "t/a has failed: ValueError: it broke",
        "t/b has failed: It exited with 1.",
    ]
    assert [bool(record.exc_info) for record in failed] == [True, False]


async def test_started_twice_is_a_bug_of_the_child(autojump_clock: MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        task_status.started()

    with pytest.raises(RestartsExceeded, match=r"RuntimeError: t/a called started\(\) a second time"):
        await supervised(tree(Child(name="a", run=run)))


async def test_a_keyboard_interrupt_in_a_child_stops_all_others_in_order(autojump_clock: MockClock) -> None:
    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep(1)
        raise KeyboardInterrupt

    events = EventLog()
    value = tree(child("a"), tree(child("y"), Child(name="b", run=run), child("z"), name="inner"), child("c"))
    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
        await supervised(value, events=events)
    assert events.stops() == ["1 z", "1 y", "1 c", "1 a"]


# Significant children ------------------------------------------------------------------


async def test_the_good_end_of_a_significant_child_ends_its_tree_well(autojump_clock: MockClock) -> None:
    job = child("job", Life(lasts_s=1), Life(lasts_s=2, error=None), restart=TRANSIENT, significant=True)
    inner = tree(child("server", Life(cleans_up_s=1)), job, name="inner", restart=TEMPORARY, significant=True)
    events = await supervised(tree(child("a"), inner))
    assert trio.current_time() == 4  # nobody cancelled it
    assert events.lines()[-6:] == listed(
        "3 t/inner/job ENDED, 3 t/inner/server STOPPING, 4 t/inner/server STOPPED, 4 t/inner ENDED",
        "4 t/a STOPPING, 4 t/a STOPPED",
    )


async def test_a_significant_child_may_end_well_before_its_tree_is_ready(autojump_clock: MockClock) -> None:
    job = child("job", Life(lasts_s=1, error=None), restart=TRANSIENT, significant=True)
    inner = tree(job, child("slow", Life(ready_after_s=3)), child("never"), name="inner", restart=TRANSIENT)
    events = await supervised(tree(inner), 9)
    assert events.lines()[-6:] == listed(
        "0 t/inner/slow STARTING, 1 t/inner/job ENDED, 1 t/inner STARTED, 1 t/inner/slow STOPPING",
        "1 t/inner/slow STOPPED, 1 t/inner ENDED",
    )


async def test_the_good_end_of_a_significant_child_precedes_a_failure_of_the_same_instant(
    autojump_clock: MockClock,
) -> None:
    job = child("job", Life(lasts_s=1, error=None), restart=TRANSIENT, significant=True)
    await supervised(tree(child("a", Life(lasts_s=1)), job, strategy=ALL, restarts_max=0))
    assert trio.current_time() == 1
