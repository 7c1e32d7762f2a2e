"""The parent of the workers: it starts them, sends them their jobs, reads their records, and always ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import trio
from attrs import define, evolve, field

from bench.load import measure
from bench.load.messages import Done, Fault, Job, Lines, Ready, Record, encode

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-m", "bench.load.worker")
GO_IN_S = 0.05  # from the order to the start, so that all workers start together
SETTLE_S = 0.2  # for what the warm-up leaves to a server, such as connections to close, before it is observed
END_WITHIN_S = 5.0


class Failed(Exception):
    """Requests failed, or a worker ended too early and wrote why to standard error: the figures would be others."""


@define(eq=False)
class Run:
    """The worker processes of one load, and what they have reported."""

    jobs: Sequence[Job]
    clock: Callable[[], float] = time.perf_counter
    observe: Callable[[], None] | None = None  # called between the warm-up and the start, which waits for it
    done: list[Done] = field(factory=list)
    warmed: list[Ready] = field(factory=list)
    start_at: float | None = None
    ended_at: float = 0.0
    stopped: bool = False
    _stop: trio.Event = field(factory=trio.Event)
    _all_ready: trio.Event = field(factory=trio.Event)
    _may_start: trio.Event = field(factory=trio.Event)

    def stop(self) -> None:
        """End the workers now; running requests are not counted."""
        self.stopped = True
        self._stop.set()
        self._all_ready.set()

    @property
    def records(self) -> list[Record]:
        """The records of all workers, in the order of their numbers."""
        return sorted((record for done in self.done for record in done.records), key=lambda record: record.number)

    @property
    def warmup_faults(self) -> list[Fault]:
        """The failures of the warm-up."""
        return [fault for ready in self.warmed for fault in ready.faults]

    async def run(self) -> None:
        """Run all workers to their end; raises `Failed`."""
        async with trio.open_nursery() as workers:
            workers.start_soon(self._start)
            for job in self.jobs:
                workers.start_soon(self._worker, job)
        self.ended_at = self.clock()

    async def _start(self) -> None:
        """Let all workers start together once the warm-up is over."""
        await self._all_ready.wait()
        if self.observe is not None and not self.stopped:
            await trio.sleep(SETTLE_S)
            self.observe()
        self.start_at = self.clock() + GO_IN_S
        self._may_start.set()

    async def _worker(self, job: Job) -> None:
        process = await trio.lowlevel.open_process(
            COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            async with trio.open_nursery() as both:
                both.start_soon(self._send, process, job)
                reported = await self._receive(process)
                both.cancel_scope.cancel(reason="the worker closed its output")
        finally:
            with trio.move_on_after(END_WITHIN_S, shield=True):
                await _end(process)
            if process.returncode is None:
                process.kill()
        if not reported and not self.stopped:
            raise Failed(f"worker {job.worker} ended with {process.returncode} before it was done")

    async def _send(self, process: trio.Process, job: Job) -> None:
        assert process.stdin is not None
        try:
            await process.stdin.send_all(encode(job))
            await self._may_start.wait()
            if not self.stopped:
                assert self.start_at is not None
                await process.stdin.send_all(encode(self.start_at))
            await self._stop.wait()
            await process.stdin.aclose()
        except trio.BrokenResourceError:
            pass  # it has ended, which `_worker` reports

    async def _receive(self, process: trio.Process) -> bool:
        """Read a worker's two messages; return whether both came."""
        assert process.stdout is not None
        reports = Lines(process.stdout)
        if (ready := await reports.next()) is None:
            return False
        self.warmed.append(msgspec.json.decode(ready, type=Ready))
        if len(self.warmed) == len(self.jobs):
            self._all_ready.set()
        if (done := await reports.next()) is None:
            return False
        self.done.append(msgspec.json.decode(done, type=Done))
        return True


async def _end(process: trio.Process) -> None:
    """Close a worker's standard streams, and wait until it has ended."""
    assert process.stdin is not None
    await process.stdin.aclose()
    await process.wait()


def split_job(job: Job, processes: int) -> list[Job]:
    """Return one job for each process."""
    return [evolve(job, worker=worker, workers=processes) for worker in range(processes)]


def run_to_end(jobs: Sequence[Job], observe: Callable[[], None] | None = None) -> Run:
    """Run a load in a loop of its own and return it; raises `Failed` if a request failed or a worker died."""
    run = Run(jobs, observe=observe)
    died: BaseExceptionGroup[Failed] | None = None
    try:
        trio.run(run.run, strict_exception_groups=True)
    except* Failed as group:
        died = group
    if died is not None:
        raise died.exceptions[0]
    failures = [f"{each.count} x {each.kind} {each.code} {each.example}" for each in measure.errors(run.records)]
    failures += [f"warm-up: {fault.kind} {fault.code} {fault.detail}" for fault in run.warmup_faults[:1]]
    if failures or not run.records:
        raise Failed("; ".join(failures) or "no request was sent")
    return run
