"""The cost of one stage: CPU time of the thread, and what it allocates.

Wall time would also count the other work of a busy machine. The collector of cycles is off while a stage runs. All
stages are measured in each round before the next begins, so a slow moment of the machine does not fall on one alone.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from statistics import median
from typing import Literal

import trio
from attrs import define, field, frozen

Part = Literal["token", "request"]
Once = Callable[[], object]
AsyncOnce = Callable[[], Awaitable[object]]
WARM_UP_CALLS = 20
PEAKS = 15  # calls whose peak of memory is taken
KEPT = 100  # calls whose results are kept


@frozen
class Stage:
    """One stage; what `prepare` returns is called many times, and does the work of `units` tokens or requests."""

    name: str
    part: Part
    prepare: Callable[[], Once]
    units: int = 1


@frozen
class TaskStage:
    """One stage that awaits; `prepare` may start helpers in the nursery."""

    name: str
    part: Part
    prepare: Callable[[trio.Nursery], Awaitable[AsyncOnce]]
    units: int = 1


AnyStage = Stage | TaskStage


@frozen
class Memory:
    """The memory of one unit: the most above the start, and what is left while the result is kept."""

    peak_bytes: float
    kept_bytes: float
    kept_blocks: float


@define
class Cost:
    """The cost of a stage: microseconds of CPU a unit, in each round."""

    stage: AnyStage
    memory: Memory | None = None
    us: list[float] = field(factory=list)


def measure(stages: Sequence[AnyStage], *, rounds: int, calls: int) -> list[Cost]:
    """Return the cost of each stage, in their order."""
    costs = [Cost(stage) for stage in stages]
    for _ in range(rounds):
        for cost in costs:
            cost.us.append(trio.run(_us, cost.stage, calls) / cost.stage.units)
    for cost in costs:
        tracemalloc.start()
        try:
            cost.memory = trio.run(_memory, cost.stage)
        finally:
            tracemalloc.stop()
    return costs


async def _us(stage: AnyStage, calls: int) -> float:
    """Return the CPU time of one call."""
    async with _prepared(stage) as (once, once_async):
        gc.collect()
        gc.disable()
        try:
            begun = time.thread_time_ns()
            if once is not None:
                for _ in repeat(None, calls):
                    once()
            else:
                for _ in repeat(None, calls):
                    await once_async()
            return (time.thread_time_ns() - begun) / 1e3 / calls
        finally:
            gc.enable()


async def _memory(stage: AnyStage) -> Memory:
    async with _prepared(stage) as (once, once_async):
        usage = _Usage(stage.units)
        for _ in range(PEAKS):
            usage.before_peak()
            result = await once_async() if once is None else once()
            usage.after_peak(result)
        usage.before_kept()
        for place in range(KEPT):
            usage.results[place] = await once_async() if once is None else once()
        return usage.memory()


@asynccontextmanager
async def _prepared(stage: AnyStage) -> AsyncIterator[tuple[Once | None, AsyncOnce]]:
    """Prepare a stage and call it some times; of the two functions the second is for stages that await."""
    async with trio.open_nursery() as nursery:
        if isinstance(stage, TaskStage):
            once, once_async = None, await stage.prepare(nursery)
        else:
            once, once_async = stage.prepare(), trio.lowlevel.checkpoint
        for _ in range(WARM_UP_CALLS):
            if once is not None:
                once()
            else:
                await once_async()
        yield once, once_async
        nursery.cancel_scope.cancel(reason="measured")


@define
class _Usage:
    """Readings of the allocator around calls."""

    units: int
    results: list[object] = field(factory=lambda: [None] * KEPT)
    _peaks: list[int] = field(factory=list)
    _bytes: int = 0
    _blocks: int = 0

    def before_peak(self) -> None:
        tracemalloc.reset_peak()
        self._bytes = tracemalloc.get_traced_memory()[0]

    def after_peak(self, _: object) -> None:
        """Take the peak; the result is an argument so that it lives until here."""
        self._peaks.append(tracemalloc.get_traced_memory()[1] - self._bytes)

    def before_kept(self) -> None:
        gc.collect()
        gc.disable()
        self._bytes, self._blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()

    def memory(self) -> Memory:
        blocks, size = sys.getallocatedblocks() - self._blocks, tracemalloc.get_traced_memory()[0] - self._bytes
        gc.enable()
        count = KEPT * self.units
        return Memory(median(self._peaks) / self.units, max(0.0, size / count), max(0.0, blocks / count))
