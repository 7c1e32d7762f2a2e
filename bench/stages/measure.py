"""The cost of one stage: CPU time of the thread, and the most memory that a call has.

Wall time would also count the other work of a busy machine. The collector of cycles is off while a stage runs. All
stages are measured in each round before the next begins, so a slow moment of the machine does not fall on one alone.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from itertools import repeat
from statistics import median
from typing import Any

import trio
from attrs import define, field, frozen
from trio.testing import wait_all_tasks_blocked

Once = Callable[[], Any]  # a coroutine function, if the stage awaits
WARM_UP_CALLS = 20
PEAKS = 15  # calls whose peak of memory is taken


@frozen
class Stage:
    """One stage; what `prepare` returns is called many times, and does the work of `units` tokens or requests.

    `prepare` may start tasks in the nursery, which end with the stage.
    """

    name: str
    prepare: Callable[[trio.Nursery], Once]
    units: int = 1


@define
class Cost:
    """The cost of a unit: microseconds of CPU in each round, and the most memory above the start."""

    stage: Stage
    us: list[float] = field(factory=list)
    peak_bytes: float = 0.0


def measure(stages: Sequence[Stage], *, rounds: int, calls: int) -> list[Cost]:
    """Return the cost of each stage, in their order."""
    costs = [Cost(stage) for stage in stages]
    for _ in range(rounds):
        for cost in costs:
            cost.us.append(trio.run(_prepared, cost.stage, lambda once: _us(once, calls)) / cost.stage.units)
    for cost in costs:
        tracemalloc.start()
        try:
            cost.peak_bytes = trio.run(_prepared, cost.stage, _peak_bytes) / cost.stage.units
        finally:
            tracemalloc.stop()
    return costs


async def _prepared(stage: Stage, measured: Callable[[Once], Awaitable[float]]) -> float:
    """Prepare a stage, call it some times, and return what is measured of it."""
    async with trio.open_nursery() as nursery:
        once = stage.prepare(nursery)
        await wait_all_tasks_blocked()
        await _call(once, WARM_UP_CALLS)
        value = await measured(once)
        nursery.cancel_scope.cancel(reason="measured")
    return value


async def _call(once: Once, calls: int) -> None:
    if iscoroutinefunction(once):
        for _ in repeat(None, calls):
            await once()
    else:
        for _ in repeat(None, calls):
            once()


async def _us(once: Once, calls: int) -> float:
    """Return the CPU time of one call."""
    gc.collect()
    gc.disable()
    try:
        begun = time.thread_time_ns()
        await _call(once, calls)
        return (time.thread_time_ns() - begun) / 1e3 / calls
    finally:
        gc.enable()


async def _peak_bytes(once: Once) -> float:
    """Return the most memory of one call above that before it, with its result."""
    peaks, awaits = [], iscoroutinefunction(once)
    for _ in range(PEAKS):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = await once() if awaits else once()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        del result  # it lives until the peak is taken
    return median(peaks)
