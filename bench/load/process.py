"""The parent of the workers: it starts them, sends them their jobs, reads their records, and always ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import trio
from attrs import astuple, define, evolve, field

from bench.load.messages import Done, Fault, Frames, Go, Job, Message, Progress, Ready, Record, Records, encode

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-m", "bench.load.worker")
GO_IN_S = 0.05  # from `Go` to the start, so that all workers start together
SETTLE_S = 0.2  # for what the warm-up leaves to a server, such as connections to close, before it is observed
END_WITHIN_S = 5.0
READ_BYTES_MAX = 1 << 20


class WorkerDied(Exception):
    """A worker ended too early; it wrote the reason to standard error."""


@define(eq=False)
class Run:
    """The worker processes of one load, and their messages so far."""

    jobs: Sequence[Job]
    clock: Callable[[], float] = time.perf_counter
    observe: Callable[[], None] | None = None  # called between the warm-up and the start, which waits for it
    records: list[Record] = field(factory=list)
    done: dict[int, Done] = field(factory=dict)  # by worker
    warmed: dict[int, Ready] = field(factory=dict)
    progress: dict[int, Progress] = field(factory=dict)
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
    def total_progress(self) -> Progress:
        """The sum of all workers' progress."""
        total = Progress()
        for progress in self.progress.values():
            total = Progress(*map(sum, zip(astuple(total), astuple(progress), strict=True)))
        return total

    @property
    def warmup_faults(self) -> list[Fault]:
        """The failures of the warm-up."""
        return [fault for ready in self.warmed.values() for fault in ready.faults]

    @property
    def lags_s(self) -> array[float]:
        """The delays of all workers' event loops."""
        lags = array("d")
        for done in self.done.values():
            lags.frombytes(done.lags)
        return lags

    async def run(self) -> None:
        """Run all workers to their end; raises `WorkerDied`."""
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
                await self._receive(process, job)
                both.cancel_scope.cancel(reason="the worker closed its output")
        finally:
            with trio.move_on_after(END_WITHIN_S, shield=True):
                await _end(process)
            if process.returncode is None:
                process.kill()
        if job.worker not in self.done and not self.stopped:
            raise WorkerDied(f"worker {job.worker} ended with {process.returncode} before it was done")

    async def _send(self, process: trio.Process, job: Job) -> None:
        assert process.stdin is not None
        try:
            await process.stdin.send_all(encode(job))
            await self._may_start.wait()
            if not self.stopped:
                assert self.start_at is not None
                await process.stdin.send_all(encode(Go(self.start_at)))
            await self._stop.wait()
            await process.stdin.aclose()
        except trio.BrokenResourceError:
            pass  # it has ended, which `_worker` reports

    async def _receive(self, process: trio.Process, job: Job) -> None:
        assert process.stdout is not None
        frames = Frames()
        while data := await process.stdout.receive_some(READ_BYTES_MAX):
            for message in frames.feed(data):
                self._on_message(message, job.worker)

    def _on_message(self, message: Message, worker: int) -> None:
        match message:
            case Ready():
                self.warmed[worker] = message
                if len(self.warmed) == len(self.jobs):
                    self._all_ready.set()
            case Progress():
                self.progress[worker] = message
            case Records():
                self.records.extend(message.records)
            case Done():
                self.done[worker] = message


async def _end(process: trio.Process) -> None:
    """Close a worker's standard streams, and wait until it has ended."""
    assert process.stdin is not None
    await process.stdin.aclose()
    await process.wait()


def split_job(job: Job, processes: int) -> list[Job]:
    """Return one job for each process."""
    return [evolve(job, worker=worker, workers=processes) for worker in range(processes)]
