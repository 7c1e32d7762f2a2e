"""The monitor of the event loop: turns of tasks beyond their budget, and the stack of a blocked loop.

Between two of its checkpoints a task has the event loop to itself: every other request, keepalive and signal waits
until that *turn* is over. So each turn has a budget of wall time. A turn beyond it is a bug of this program, and is
counted under the name of the task's function. Wall time is measured, because a busy machine and a thread with Python's
lock delay others as much as work does. Garbage collection is counted by itself: it happens in the turn of any
allocation, and is not caused by that task.

An instrument of Trio runs only after a turn. An endless turn is found by a thread, which looks at the loop twice a
second and logs its stack. The counted names are bounded, since they become labels of metrics.
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

from supervisor.threads.queued_writer import start_daemon_thread

from .registry import Registry

log = logging.getLogger(__name__)

TURN_MAX_S = 0.02
BLOCKED_S = 2.0  # a longer turn is logged by the thread
LOOK_INTERVAL_S = 0.5  # the thread's interval
LOG_INTERVAL_S = 10.0  # the time between two lines about one function
NAMES_MAX = 64
OTHERS = "others"
COLLECTION = "garbage collection"
DEPTH_MAX = 16  # logged calls of a task or thread


@define(eq=False)
class _SlowTurns:
    count: int = 0
    longest_s: float = 0.0
    logged_at: float = float("-inf")


@define(eq=False)
class LoopMonitor(trio.abc.Instrument):
    """Measure each turn of each task of a `trio.run`; count turns of more than `turn_max_s` seconds."""

    turn_max_s: float = TURN_MAX_S
    clock: Callable[[], float] = time.perf_counter
    start_thread: Callable[[Callable[[], None]], None] = start_daemon_thread
    stopped: threading.Event = field(factory=threading.Event)
    _slow: dict[str, _SlowTurns] = field(factory=dict)  # keys: names of functions
    _since: float = 0.0  # the beginning of the present turn
    _idle: bool = True  # the loop waits for I/O or a deadline, for as long as it takes
    _collecting_since: float = 0.0
    _thread: int = 0  # the id of the event loop's thread

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Monitor the event loop of the calling task while the body runs."""
        self._thread, self._since = threading.get_ident(), self.clock()
        trio.lowlevel.add_instrument(self)
        gc.callbacks.append(self.collected)
        self.start_thread(self._look)
        try:
            yield
        finally:
            self.stopped.set()
            gc.callbacks.remove(self.collected)
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, _: float) -> None:
        """Record that no task is ready."""
        self._idle = True

    def after_io_wait(self, _: float) -> None:
        """Record the beginning of the first turn of a batch."""
        self._since = self.clock()
        self._idle = False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Measure the turn that has ended; the next one begins."""
        now = self.clock()
        if now - self._since > self.turn_max_s:
            self.count(task_function(task), now - self._since, task)
            now = self.clock()
        self._since = now

    def add_metrics(self, registry: Registry) -> None:
        """Define the metrics of slow turns."""
        registry.add_counter(
            *("espalier_event_loop_slow_turns", "Turns of tasks beyond their budget", "task"),
            lambda: [((name,), slow.count) for name, slow in list(self._slow.items())],
        )
        registry.add_gauge(
            *("espalier_event_loop_turn_max_seconds", "The longest of these", "task"),
            lambda: [((name,), slow.longest_s) for name, slow in list(self._slow.items())],
        )

    def statistics(self) -> Mapping[str, int]:
        """Return the number of turns beyond the budget by function."""
        return {name: slow.count for name, slow in self._slow.items()}

    def count(self, name: str, duration_s: float, task: trio.lowlevel.Task | None = None) -> None:
        """Count a function's turn beyond the budget, and log it unless the function was logged lately."""
        if name not in self._slow and len(self._slow) >= NAMES_MAX:
            name = OTHERS
        slow = self._slow.setdefault(name, _SlowTurns())
        slow.count += 1
        slow.longest_s = max(slow.longest_s, duration_s)
        if (now := self.clock()) - slow.logged_at >= LOG_INTERVAL_S:
            slow.logged_at = now
            extra = {"task": name, "duration_s": round(duration_s, 3), "count": slow.count}
            log.warning("a turn took too long", extra=extra | ({} if task is None else {"awaiting": await_chain(task)}))

    def collected(self, phase: str, _: Mapping[str, int]) -> None:
        """Subtract a collection of garbage from its turn, and measure it alone."""
        if phase == "start":
            self._collecting_since = self.clock()
            return
        duration_s = self.clock() - self._collecting_since
        self._since += duration_s
        if duration_s > self.turn_max_s:
            self.count(COLLECTION, duration_s)

    def _look(self) -> None:
        """Log the stack of each blocked turn once; runs in a thread."""
        logged: float | None = None
        last_look_at = self.clock()
        while not self.stopped.wait(LOOK_INTERVAL_S):
            previous_at, last_look_at = last_look_at, self.clock()
            if last_look_at - previous_at > BLOCKED_S:
                continue  # the whole process was stopped, this thread included
            since = self._since
            if not self._idle and since != logged and self.clock() - since > BLOCKED_S:
                logged = since
                frame = sys._current_frames().get(self._thread)  # noqa: SLF001  # the only way to read its stack
                stack = [] if frame is None else traceback.format_stack(frame)[-DEPTH_MAX:]
                extra = {"duration_s": round(self.clock() - since, 1), "stack": stack}
                log.error("the event loop is blocked", extra=extra)


def task_function(task: trio.lowlevel.Task) -> str:
    """Return the qualified name of a task's function: from a bounded set, unlike the names of tasks."""
    code = getattr(task.coro, "cr_code", None)
    if code is None:  # a coroutine of another kind
        return type(task.coro).__name__
    module = code.co_filename.rpartition("/")[2].removesuffix(".py")
    return f"{module}.{code.co_qualname}"


def await_chain(task: trio.lowlevel.Task) -> str:
    """Return the functions in which a task awaits now: one of them had a slow turn that has just ended."""
    names: list[str] = []
    coroutine: object = task.coro
    while (code := getattr(coroutine, "cr_code", None)) is not None and len(names) < DEPTH_MAX:
        names.append(code.co_name)
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(names)
