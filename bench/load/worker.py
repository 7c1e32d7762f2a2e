"""One worker: it sends its share of the plan, and measures its own CPU time.

`python -m bench.load.worker` reads a `Job` from its standard input, warms up, writes `Ready`, reads when to begin,
sends the requests, and writes `Done`. The end of its input ends it early; it still reports.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import trio
from attrs import define, field

from bench.load import plan
from bench.load.client import Exchange, Pool
from bench.load.messages import Done, Fault, Job, Lines, Ready, Record, encode
from bench.load.plan import PlannedRequest
from bench.load.requests import Address, parse_url

WARM_UP_CLIENTS_MAX = 16
CONNECTING_MAX = 32  # at once, of connections that are kept for the load


@define(eq=False)
class Worker:
    """Sends one share of a load."""

    job: Job
    clock: Callable[[], float] = time.perf_counter
    _where: Address = field(init=False)
    _sending: trio.CancelScope = field(factory=trio.CancelScope)
    _ended: list[Record] = field(factory=list)
    _warm: list[Pool] = field(factory=list)  # of the warm-up, if its connections are kept

    def __attrs_post_init__(self) -> None:
        self._where = parse_url(self.job.target.url, self.job.target.api)

    def stop(self) -> None:
        """Stop sending and abandon the running requests, which are not counted."""
        self._sending.cancel(reason="stopped")

    async def warm_up(self) -> tuple[Fault, ...]:
        """Send the requests of the warm-up, and return their failures."""
        job = self.job
        numbers = plan.warmup_share(job.pace, job.worker, job.workers)
        together = plan.clients_per_worker(job.pace.clients or WARM_UP_CLIENTS_MAX, job.worker, job.workers)
        requests = (plan.planned_request(job.workload, number) for number in numbers)
        await self._clients(requests, min(together, len(numbers)), keep=job.pace.warm_connections)
        faults = tuple(record.fault for record in self._ended if record.fault is not None)
        self._ended.clear()
        return faults

    async def run(self, start_at: float) -> Done:
        """Send the requests from a time of the clock on, and return what came of them."""
        job = self.job
        await trio.sleep(max(0.0, start_at - self.clock()))
        cpu_s = time.process_time()
        with self._sending:
            requests = plan.share(job.pace, job.workload, job.worker, job.workers)
            if job.pace.clients is None:
                await self._at_their_times(requests, start_at)
            else:
                count = plan.clients_per_worker(job.pace.clients, job.worker, job.workers)
                duration_s = float("inf") if job.pace.duration_s is None else job.pace.duration_s
                await self._clients(requests, count, start_at, start_at + duration_s)
        wall_s, cpu_s = self.clock() - start_at, time.process_time() - cpu_s
        return Done(wall_s=wall_s, cpu_s=cpu_s, records=tuple(self._ended))

    async def _clients(
        self,
        requests: Iterator[PlannedRequest],
        count: int,
        start_at: float = 0.0,
        end_at: float = float("inf"),
        *,
        keep: bool = False,
    ) -> None:
        """Run clients, each of which sends the next request when its last answer has ended.

        Each has a connection of its own, which it may have from the warm-up.
        """
        # Without a limit, thousands would overflow the queue of the server's listener: connections that are to be kept
        # are no test of it.
        limit = trio.Semaphore(CONNECTING_MAX) if keep else None
        fresh = (Pool(self.job.target, self._where, connecting=limit) for _ in range(count - len(self._warm)))
        pools, self._warm = [*self._warm, *fresh], []

        async def client(pool: Pool) -> None:
            while self.clock() < end_at and (request := next(requests, None)) is not None:
                await self._exchange(request, pool, start_at)

        try:
            async with trio.open_nursery() as clients:
                for pool in pools:
                    clients.start_soon(client, pool)
        finally:
            if keep:
                self._warm = pools
            else:
                for pool in pools:
                    pool.close()

    async def _at_their_times(self, requests: Iterator[PlannedRequest], start_at: float) -> None:
        """Send each request when it is due, independently of the others."""
        pool = Pool(self.job.target, self._where)
        try:
            async with trio.open_nursery() as running:
                for request in requests:
                    assert request.at_s is not None
                    await trio.sleep(max(0.0, start_at + request.at_s - self.clock()))
                    running.start_soon(self._exchange, request, pool, start_at)
        finally:
            pool.close()

    async def _exchange(self, request: PlannedRequest, pool: Pool, start_at: float) -> None:
        self._ended.append(await Exchange(request, pool, self.clock).run(start_at))


async def main() -> None:
    """Run a worker on the standard streams."""
    sink = trio.lowlevel.FdStream(sys.stdout.fileno())
    orders = Lines(trio.lowlevel.FdStream(sys.stdin.fileno()))
    if (job := await orders.next()) is None:
        return
    worker = Worker(msgspec.json.decode(job, type=Job))
    await sink.send_all(encode(Ready(await worker.warm_up())))
    if (start_at := await orders.next()) is None:
        return
    gc.collect()
    gc.freeze()  # objects of the start stay: the collector skips them from now on
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_at_the_end, orders, worker)
        await sink.send_all(encode(await worker.run(float(start_at))))
        nursery.cancel_scope.cancel(reason="the worker has reported")


async def _stop_at_the_end(orders: Lines, worker: Worker) -> None:
    while await orders.next() is not None:
        pass
    worker.stop()


if __name__ == "__main__":
    try:
        trio.run(main, strict_exception_groups=True)
    except* trio.BrokenResourceError:
        pass  # the parent has gone
