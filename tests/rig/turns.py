"""The limit of a turn of the event loop in every test, in CPU time of the thread, since machines are busy.

A step of a task whose function stands in the product is measured; one of a test's own function is the test's affair.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from supervisor.telemetry.loop_monitor import await_chain, task_function

ROOT = Path(__file__).parents[2]
ROOMS = tuple(str(ROOT / room) for room in ("protocol", "actors", "supervisor"))
TURN_CPU_MAX_S = 0.05  # what is 20 ms of an idle machine, on a busy one


class CpuTurns(trio.abc.Instrument):
    """Records the steps of the product's tasks that took more CPU time than a turn may."""

    def __init__(self) -> None:
        self.exceeded: list[str] = []
        self._began = self._collecting = 0.0

    def before_task_step(self, _: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = time.thread_time() - self._began
        if took_s > TURN_CPU_MAX_S and is_product(task):
            self.exceeded.append(
                f"{task_function(task)} took {took_s:.3f} s of CPU in one turn; it is in {await_chain(task)}"
            )

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """Take the collection of a whole test run's garbage out of the turn in which it happens to be done."""
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._began += time.thread_time() - self._collecting


def is_product(task: trio.lowlevel.Task) -> bool:
    """Whether a task's function stands in the product."""
    code = getattr(task.coro, "cr_code", None)
    return code is not None and code.co_filename.startswith(ROOMS)


@contextmanager
def cpu_watched() -> Iterator[list[str]]:
    """Watch every `trio.run` of the body; what exceeded its budget is in the list that is yielded, at the end."""
    exceeded: list[str] = []
    plain = trio.run

    def run(*args: Any, instruments: Iterable[trio.abc.Instrument] = (), **options: Any) -> Any:
        turns = CpuTurns()
        gc.callbacks.append(turns.collected)
        try:
            return plain(*args, instruments=[*instruments, turns], **options)
        finally:
            gc.callbacks.remove(turns.collected)
            exceeded.extend(turns.exceeded)

    core = trio._core  # noqa: SLF001  # Trio's own tests take `run` from there
    trio.run = core.run = run  # type: ignore[assignment,attr-defined]
    try:
        yield exceeded
    finally:
        trio.run = core.run = plain  # type: ignore[attr-defined]
