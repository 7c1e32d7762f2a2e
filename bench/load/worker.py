"""One worker: it sends its share of the plan, and measures its own CPU time and delays.

`python -m bench.load.worker` reads a `Job` from its standard input, warms up, writes `Ready`, waits for `Go`, and
writes its records to its standard output. The end of its input ends it.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext

import trio
from attrs import define, evolve, field

from bench.load import plan
from bench.load.client import Exchange, Pool
from bench.load.messages import Done, Ending, Frames, Go, Job, Message, Progress, Ready, Record, Records, encode
from bench.load.requests import Address, History, parse_url

Send = Callable[[Message], Awaitable[None]]
WARM_UP_CLIENTS_MAX = 16
CONNECTING_MAX = 32  # at once, of connections that are kept for the load
REPORT_EVERY_S = 0.25
LAG_EVERY_S = 0.01
READ_BYTES_MAX = 64 * 1024


@define(eq=False)
class Worker:
    """Sends one share of a load."""

    job: Job
    send: Send
    clock: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    _where: Address = field(init=False)
    _start_at: float = 0.0
    _counts: Progress = field(factory=Progress)
    _running: int = 0
    _tokens: int = 0
    _opened: int = 0
    _may_begin: trio.Event = field(factory=trio.Event)
    _waiting: trio.CancelScope = field(factory=trio.CancelScope)
    _sending: trio.CancelScope = field(factory=trio.CancelScope)
    _ended: list[Record] = field(factory=list)  # and not yet sent to the parent
    _lags: array[float] = field(factory=lambda: array("d"))
    _warm: list[Pool] = field(factory=list)  # of the warm-up, if its connections are kept

    def __attrs_post_init__(self) -> None:
        self._where = parse_url(self.job.target.url, self.job.target.api)

    def go(self, start: Go) -> None:
        """Begin at a time."""
        self._start_at = start.at_s
        self._may_begin.set()

    def stop(self) -> None:
        """Stop sending and abandon the running requests, which are not counted."""
        self._waiting.cancel(reason="stopped")
        self._sending.cancel(reason="stopped")

    async def run(self) -> None:
        """Warm up, wait for `Go`, send the requests, and report."""
        with self._waiting:
            await self._warm_up()
            await self._may_begin.wait()
            await trio.sleep(max(0.0, self._start_at - self.clock()))
        if self._waiting.cancelled_caught:
            self._close(*self._warm)
            return
        self._tokens = self._opened = 0
        cpu_s = self.cpu()
        async with trio.open_nursery() as helpers:
            helpers.start_soon(self._measure_lag)
            helpers.start_soon(self._report_regularly)
            with self._sending:
                await (self._open_loop() if self.job.pace.open_loop else self._closed_loop())
            helpers.cancel_scope.cancel(reason="all has been sent and answered")
        wall_s, cpu_s = self.clock() - self._start_at, self.cpu() - cpu_s
        await self._report()
        lags = self._lags.tobytes()
        await self.send(Done(wall_s=wall_s, cpu_s=cpu_s, tokens=self._tokens, lags=lags, connections=self._opened))

    # Loops -------------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        job = self.job
        numbers = list(plan.warmup_share(job.pace, job.worker, job.workers))
        together = plan.clients_per_worker(job.pace.clients or WARM_UP_CLIENTS_MAX, job.worker, job.workers)
        left = iter(numbers)

        async def client(pool: Pool) -> None:
            for number in left:
                await self._exchange(plan.planned_request(job.workload, number), pool)

        await self._clients(client, min(together, len(numbers)), keep=job.pace.warm_connections)
        faults = tuple(record.fault for record in self._ended if record.fault is not None)
        self._ended, self._counts = [], Progress()
        await self.send(Ready(len(numbers), faults))

    async def _closed_loop(self) -> None:
        """Let each client send when its last answer has ended; requests go to the next free client."""
        job = self.job
        numbers = plan.share(job.pace, job.workload, job.worker, job.workers)
        end_at = self._start_at + (float("inf") if job.pace.duration_s is None else job.pace.duration_s)

        async def client(pool: Pool) -> None:
            pauses = False
            while True:
                if pauses and job.pace.think_s > 0:
                    await trio.sleep(job.pace.think_s)
                pauses = True
                if self.clock() >= end_at or (due := next(numbers, None)) is None:
                    return
                await self._conversation(plan.conversation(job.workload, due[0]), pool, end_at)

        await self._clients(client, plan.clients_per_worker(job.pace.clients or 1, job.worker, job.workers))

    async def _clients(self, client: Callable[[Pool], Awaitable[None]], count: int, *, keep: bool = False) -> None:
        """Run clients, each with a connection of its own, which it may have from the warm-up."""
        # Without a limit, thousands would overflow the queue of the server's listener: connections that are to be kept
        # are no test of it.
        limit = trio.Semaphore(CONNECTING_MAX) if keep else None
        fresh = (Pool(self.job.target, self._where, connecting=limit) for _ in range(count - len(self._warm)))
        pools, self._warm = [*self._warm, *fresh], []
        try:
            async with trio.open_nursery() as clients:
                for pool in pools:
                    clients.start_soon(client, pool)
        finally:
            if keep:
                self._warm = pools
            else:
                self._close(*pools)

    async def _open_loop(self) -> None:
        """Send each request when it is due, independently of the others."""
        job, pace = self.job, self.job.pace
        permits = pace.concurrency_max and plan.clients_per_worker(pace.concurrency_max, job.worker, job.workers)
        limit = None if permits is None else trio.Semaphore(permits)
        pool = Pool(job.target, self._where)
        try:
            async with trio.open_nursery() as requests:
                for number, at_s in plan.share(pace, job.workload, job.worker, job.workers):
                    assert at_s is not None
                    if (early_s := self._start_at + at_s - self.clock()) > 0:
                        await trio.sleep(early_s)
                    else:
                        await trio.lowlevel.checkpoint()  # it is late, but answers must be read
                    requests.start_soon(self._due, number, at_s, pool, limit)
        finally:
            self._close(pool)

    async def _due(self, number: int, at_s: float, pool: Pool, limit: trio.Semaphore | None) -> None:
        requests = plan.conversation(self.job.workload, number, at_s)
        if self.job.workload.turns.most == 1:
            await self._conversation(requests, pool, limit=limit)
            return
        own = Pool(self.job.target, self._where)
        pool.lend(own)
        try:
            await self._conversation(requests, own, limit=limit)
        finally:
            pool.take_back(own)

    async def _conversation(
        self,
        requests: Iterator[plan.PlannedRequest],
        pool: Pool,
        end_at: float = float("inf"),
        limit: trio.Semaphore | None = None,
    ) -> None:
        """Send the turns of a conversation one after the other; a turn that does not complete ends it."""
        history = History() if self.job.workload.turns.most > 1 else None
        for request in requests:
            if request.turn:
                await trio.sleep(self.job.pace.think_s)
                if self.clock() >= end_at:
                    return
            woke_at = self.clock()
            lag_s = None if request.at_s is None else woke_at - self._start_at - request.at_s
            async with limit or nullcontext():
                held_s = self.clock() - woke_at if limit is not None else None if lag_s is None else 0.0
                ending = await self._exchange(request, pool, lag_s, held_s, history)
            if ending != "completed":
                return

    async def _exchange(
        self,
        request: plan.PlannedRequest,
        pool: Pool,
        lag_s: float | None = None,
        held_s: float | None = None,
        history: History | None = None,
    ) -> Ending:
        self._running += 1
        record = await Exchange(request, pool, self.clock, self._on_tokens, history).run(self._start_at, lag_s, held_s)
        self._running -= 1
        self._ended.append(record)
        self._counts = evolve(self._counts, **{record.ending: getattr(self._counts, record.ending) + 1})
        return record.ending

    def _on_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def _close(self, *pools: Pool) -> None:
        for pool in pools:
            self._opened += pool.opened
            pool.close()

    # Self-measurement -------------------------------------------------------------------------

    async def _measure_lag(self) -> None:
        """Sleep again and again, and record how late each wake-up is."""
        while True:
            due_at = self.clock() + LAG_EVERY_S
            await trio.sleep(LAG_EVERY_S)
            self._lags.append(max(0.0, self.clock() - due_at))

    async def _report_regularly(self) -> None:
        while True:
            await trio.sleep(REPORT_EVERY_S)
            await self._report()

    async def _report(self) -> None:
        ended, self._ended = self._ended, []
        with trio.CancelScope(shield=True):  # else the end of the run would lose what was taken
            await self.send(evolve(self._counts, running=self._running, tokens=self._tokens))
            if ended:
                await self.send(Records(tuple(ended)))


# The process ------------------------------------------------------------------------------


async def main() -> None:
    """Run a worker on the standard streams. The end of the input stops it; it still reports."""
    source = trio.lowlevel.FdStream(sys.stdin.fileno())
    sink = trio.lowlevel.FdStream(sys.stdout.fileno())
    frames = Frames()
    worker: Worker | None = None

    async def send(message: Message) -> None:
        await sink.send_all(encode(message))

    async def work(worker: Worker) -> None:
        await worker.run()
        nursery.cancel_scope.cancel(reason="the worker has reported")

    try:
        async with trio.open_nursery() as nursery:
            async for data in source:
                for message in frames.feed(data):
                    if isinstance(message, Job):
                        worker = Worker(message, send)
                        nursery.start_soon(work, worker)
                    elif isinstance(message, Go) and worker is not None:
                        gc.collect()
                        gc.freeze()  # objects of the start stay: the collector skips them from now on
                        worker.go(message)
            if worker is not None:
                worker.stop()
    except* trio.BrokenResourceError:
        pass  # the parent has gone


if __name__ == "__main__":
    trio.run(main, strict_exception_groups=True)
