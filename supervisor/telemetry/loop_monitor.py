"""Turns of the event loop: which task's step took longer than its budget, and where a loop stands that stands still.

Between two of its awaits a task has the loop for itself. Every other request, heartbeat and signal waits until that
step is over, so each has a budget. What exceeds it is a mistake of this program, and is counted by the task's function.
The budget is of wall time: a thread that keeps Python's lock, or a busy machine, delays others as much as work does.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import trio
from attrs import define, field
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from supervisor.threads.queued_writer import start_daemon_thread

log = logging.getLogger(__name__)

TURN_MAX_S = 0.02
STANDSTILL_S = 2.0  # of one step, after which a thread says where it is
LOOKS_S = 0.5
LINES_EVERY_S = 10.0  # of one function, which may exceed its budget with each request
NAMES_MAX = 64
OTHERS = "others"
COLLECTION = "garbage collection"
DEPTH_MAX = 16  # of what is said of a task's or a thread's calls
OLDEST = 2  # the generation whose collection takes as long as the heap is large


@define(eq=False)
class _Exceeded:
    count: int = 0
    longest_s: float = 0.0
    told_at: float = float("-inf")


@define(eq=False)
class LoopMonitor(trio.abc.Instrument):
    """Measures each step of each task of a `trio.run`, and counts those that take longer than `turn_max_s`."""

    turn_max_s: float = TURN_MAX_S
    clock: Callable[[], float] = time.perf_counter
    start: Callable[[Callable[[], None]], None] = start_daemon_thread
    _exceeded: dict[str, _Exceeded] = field(factory=dict)
    _since: float = 0.0  # when the step that is being taken began
    _waits: bool = True  # for the outside world, which may take as long as it likes
    _collects_since: float = 0.0
    _loop: int = 0  # its thread
    _over: threading.Event = field(factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the event loop of the task that calls, for the body."""
        self._loop, self._since = threading.get_ident(), self.clock()
        trio.lowlevel.add_instrument(self)
        gc.callbacks.append(self._collected)
        self.start(self._look)
        try:
            yield
        finally:
            self._over.set()
            gc.callbacks.remove(self._collected)
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, _: float) -> None:
        """Note that nothing is left to do."""
        self._waits = True

    def after_io_wait(self, _: float) -> None:
        """Note that the next turn begins."""
        self._since = self.clock()
        self._waits = False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Judge the step that has been taken; the next one begins."""
        now = self.clock()
        if now - self._since > self.turn_max_s:
            self._exceeds(task_function(task), now - self._since, task)
            now = self.clock()
        self._since = now

    def families(self) -> Iterator[Metric]:
        """Yield the metric families of the steps that took too long."""
        turns = CounterMetricFamily(
            "espalier_event_loop_slow_turns", "Steps of tasks beyond their budget", labels=("task",)
        )
        longest = GaugeMetricFamily("espalier_event_loop_turn_max_seconds", "The longest of these", labels=("task",))
        for name, each in list(self._exceeded.items()):  # another thread's collection may add one
            turns.add_metric((name,), each.count)
            longest.add_metric((name,), each.longest_s)
        yield from (turns, longest)

    @property
    def exceeded(self) -> Mapping[str, int]:
        """How often each function exceeded its budget."""
        return {name: each.count for name, each in self._exceeded.items()}

    def _exceeds(self, name: str, took_s: float, task: trio.lowlevel.Task | None = None) -> None:
        if name not in self._exceeded and len(self._exceeded) >= NAMES_MAX:
            name = OTHERS
        each = self._exceeded.setdefault(name, _Exceeded())
        each.count += 1
        each.longest_s = max(each.longest_s, took_s)
        if (now := self.clock()) - each.told_at >= LINES_EVERY_S:
            each.told_at = now
            extra = {"task": name, "took_s": round(took_s, 3), "count": each.count}
            log.warning("a turn took too long", extra=extra | ({} if task is None else {"waits_in": await_chain(task)}))

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        """Take what collecting garbage takes out of the turn in which it happens to be done."""
        if info["generation"] != OLDEST:
            return
        if phase == "start":
            self._collects_since = self.clock()
            return
        took_s = self.clock() - self._collects_since
        self._since += took_s
        if took_s > self.turn_max_s:
            self._exceeds(COLLECTION, took_s)

    def _look(self) -> None:
        """Say once of each step that does not end where it is; runs in a thread of its own."""
        told: float | None = None
        looked_at = self.clock()
        while not self._over.wait(LOOKS_S):
            looks_at, looked_at = looked_at, self.clock()
            if looked_at - looks_at > STANDSTILL_S:
                continue  # the whole process stood still, this thread too
            since = self._since
            if not self._waits and since != told and self.clock() - since > STANDSTILL_S:
                told = since
                frame = sys._current_frames().get(self._loop)  # noqa: SLF001  # there is no other way to see it
                stack = [] if frame is None else traceback.format_stack(frame)[-DEPTH_MAX:]
                extra = {"for_s": round(self.clock() - since, 1), "stack": stack}
                log.error("the event loop stands still", extra=extra)


def task_function(task: trio.lowlevel.Task) -> str:
    """Return the name of the function that a task runs: one of few, whoever it runs for."""
    code = getattr(task.coro, "cr_code", None)
    if code is None:  # a coroutine of another kind
        return type(task.coro).__name__
    module = code.co_filename.rpartition("/")[2].removesuffix(".py")
    return f"{module}.{code.co_qualname}"


def await_chain(task: trio.lowlevel.Task) -> str:
    """Return the functions in which a task waits now, behind a step that took too long: it was in one of them."""
    names: list[str] = []
    coroutine: object = task.coro
    while (code := getattr(coroutine, "cr_code", None)) is not None and len(names) < DEPTH_MAX:
        names.append(code.co_name)
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(names)
