"""A turn that takes too long is counted by its function, logged at intervals, and found while it lasts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from supervisor.telemetry.loop_monitor import COLLECTION, LOG_INTERVAL_S, NAMES_MAX, OTHERS, LoopMonitor
from supervisor.telemetry.metrics import Metrics
from tests.rig.log_records import log_records


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> LoopMonitor:
    return LoopMonitor(0.02, clock, start_thread=lambda run: None)


async def works(clock: Clock, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        await trio.lowlevel.checkpoint()
        clock.now += seconds
    await trio.lowlevel.checkpoint()


async def beside(turns: LoopMonitor, *tasks: tuple[Any, ...]) -> None:
    with turns.watching():
        async with trio.open_nursery() as nursery:
            for function, *arguments in tasks:
                nursery.start_soon(function, *arguments)


async def test_a_turn_beyond_its_budget_is_counted_by_its_function_and_logged(
    turns: LoopMonitor, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await beside(turns, (works, clock, 0.019, 50), (works, clock, 0.5))
    assert turns.statistics() == {"test_loop_monitor.works": 1}
    (record,) = log_records(caplog)
    assert (record.message, record.task, record.duration_s) == ("a turn took too long", "test_loop_monitor.works", 0.5)
    assert record.awaiting.startswith("works > checkpoint")
    metrics = Metrics()
    turns.add_metrics(metrics.registry)
    text = metrics.render({}).decode()
    assert 'espalier_event_loop_slow_turns_total{task="test_loop_monitor.works"} 1.0' in text
    assert 'espalier_event_loop_turn_max_seconds{task="test_loop_monitor.works"} 0.5' in text


async def test_waiting_for_io_is_not_counted_as_a_turn(turns: LoopMonitor, clock: Clock) -> None:
    async def waits() -> None:
        await trio.sleep(0.001)
        clock.now += 0.01

    turns.before_io_wait(1.0)
    clock.now += 100
    turns.after_io_wait(1.0)
    await beside(turns, (waits,))
    assert turns.statistics() == {}


async def test_a_function_is_logged_once_in_an_interval(
    turns: LoopMonitor, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await beside(turns, (works, clock, 0.1, 50))
    assert turns.statistics() == {"test_loop_monitor.works": 50}
    assert len(log_records(caplog)) == 1
    clock.now += LOG_INTERVAL_S
    await beside(turns, (works, clock, 0.1))
    assert [record.count for record in log_records(caplog)] == [1, 51]


async def test_the_number_of_names_is_bounded(turns: LoopMonitor) -> None:
    for number in range(3 * NAMES_MAX):
        turns.count(f"function {number}", 1.0)
    assert len(turns.statistics()) == NAMES_MAX + 1
    assert turns.statistics()[OTHERS] == 2 * NAMES_MAX


@pytest.mark.parametrize("generation", [0, 1, 2])
async def test_a_garbage_collection_is_not_counted_in_the_turn_of_a_task(
    generation: int, turns: LoopMonitor, clock: Clock
) -> None:
    async def collects() -> None:
        await trio.lowlevel.checkpoint()
        turns.collected("start", {"generation": generation})
        clock.now += 0.3
        turns.collected("stop", {"generation": generation})
        clock.now += 0.01

    await beside(turns, (collects,))
    assert turns.statistics() == {COLLECTION: 1}


async def test_a_stopped_process_is_not_reported_as_a_blocked_loop(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Callable[[], None]] = []
    stops = iter((7.0,))
    turns = LoopMonitor(0.02, clock, start_thread=looks.append)

    def wait(_: object) -> bool:
        stop_s = next(stops, None)
        clock.now += stop_s or 0.0
        return stop_s is None

    monkeypatch.setattr(turns.stopped, "wait", wait)
    with turns.watching():
        await trio.lowlevel.checkpoint()
        clock.now += 0.1
        looks[0]()
        await trio.lowlevel.checkpoint()
    assert "the event loop is blocked" not in caplog.messages


async def test_the_stack_of_a_blocked_loop_is_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, logged = [], threading.Event()

    class Looked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is blocked" in record.getMessage():
                logged.set()

    handler = Looked()
    logging.getLogger("supervisor.telemetry.loop_monitor").addHandler(handler)
    turns = LoopMonitor(0.02, clock, start_thread=lambda run: threads.append(threading.Thread(target=run)))
    monkeypatch.setattr(turns.stopped, "wait", lambda _: turns.stopped.is_set())

    def stuck_in_here() -> None:
        threads[0].start()
        clock.now += 5.0
        assert logged.wait(20.0)

    try:
        with turns.watching():
            await trio.lowlevel.checkpoint()
            stuck_in_here()
            await trio.lowlevel.checkpoint()
        threads[0].join(20.0)
    finally:
        logging.getLogger("supervisor.telemetry.loop_monitor").removeHandler(handler)
    (record,) = [each for each in log_records(caplog) if each.message == "the event loop is blocked"]
    assert any("stuck_in_here" in line for line in record.stack)
    assert record.duration_s == 5.0
