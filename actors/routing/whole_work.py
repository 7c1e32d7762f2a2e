"""Work that one worker does as a whole: asked of the best of several, and elsewhere after a loss.

An encoder or an embedder answers by one result, so nothing has to be resumed: a lost attempt is repeated, by another
worker, or by the same one once it is up again. Attempts are counted by cause. An engine's crash may be the work's own
doing, and work that crashes engines must not be given to all of them.

A client's request is several pieces of such work, all of which are done or none (`all_or_none`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeAlias, TypeVar

import trio
from attrs import define, field, frozen

from actors.kit.groups import first_leaf, raise_part
from actors.routing.load import Load
from actors.routing.ports import RoutedAnswerer, RoutingObserver
from actors.routing.route import FailoverLimits
from protocol.errors import ActorLost, AskerLeft, Draining, EngineLost, LinkLost, NotReady, Overloaded, RequestError
from protocol.trace import Trace

FAILOVER = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)
"""Errors after which work is done elsewhere: the worker, its node or the link to it may be to blame."""

Req = TypeVar("Req")
Res = TypeVar("Res")
Piece = TypeVar("Piece")

WithLoads: TypeAlias = Sequence[tuple[RoutedAnswerer[Req, Res], Load]]


async def all_or_none(pieces: Sequence[Piece], do: Callable[[Piece], Awaitable[Res]], at_once: int) -> list[Res]:
    """Return the results of all pieces in order, with so many of them on their way at once.

    The failure of one ends the others in the same turn, and its `RequestError` is raised.
    """
    results: dict[int, Res] = {}
    left = iter(enumerate(pieces))

    async def work() -> None:  # noqa: ASYNC910  # a task of its own
        for index, piece in left:
            results[index] = await do(piece)

    try:
        async with trio.open_nursery() as nursery:
            for _ in pieces[:at_once]:
                nursery.start_soon(work)
    except BaseExceptionGroup as group:
        failed, rest = group.split(RequestError)
        try:
            if failed is None or rest is not None:
                raise
            raise_part(first_leaf(failed))
        finally:
            del failed, rest  # their tracebacks refer to this frame, and so to the pieces
    return [results[index] for index in range(len(pieces))]  # noqa: ASYNC910  # the nursery has checkpoints


@frozen
class WholeWork(Generic[Req, Res]):
    """The workers that do one sort of work for one model, and the limits on losing some."""

    workers: Callable[[], Sequence[RoutedAnswerer[Req, Res]]]  # those that can be asked now
    wait_changed: Callable[[], Awaitable[None]]  # until one has come, gone, or become less busy
    limits: FailoverLimits
    observer: RoutingObserver
    none_up: str  # the sentence of a request for which no worker comes up in time
    asking: Callable[[str], AbstractContextManager[Trace | None]]  # records a call to a worker, and yields its trace

    async def result(
        self,
        make: Callable[[int, Trace | None], Req],
        prefer: Callable[[WithLoads[Req, Res]], RoutedAnswerer[Req, Res]] | None = None,
    ) -> Res:
        """Return the result of one piece of work; raises the error of the last attempt.

        `make` returns the request of an attempt after so many crashes, with this trace and an id of its own. `prefer`
        chooses among workers with room; None: the least busy one.
        """
        return await _Attempts(self, make, prefer or least_busy).result()


def least_busy(candidates: WithLoads[Req, Res]) -> RoutedAnswerer[Req, Res]:
    """Return the worker with the least of its places taken."""
    return min(candidates, key=lambda candidate: candidate[1].busy / candidate[1].slots)[0]


@define(eq=False)
class _Attempts(Generic[Req, Res]):
    """One piece of work on its way through workers."""

    ways: WholeWork[Req, Res]
    make: Callable[[int, Trace | None], Req]
    prefer: Callable[[WithLoads[Req, Res]], RoutedAnswerer[Req, Res]]
    _losses: int = 0
    _crashes: int = 0
    _pause_s: float = field(default=0.0)

    async def result(self) -> Res:
        """Return the result; raises the error of the last attempt."""
        lost: set[str] = set()
        worker = await self._first()
        while True:
            try:
                return await self._asked(worker)
            except FAILOVER as error:
                lost.add(worker.full_name)
                worker = await self._next(error, lost)

    async def _asked(self, worker: RoutedAnswerer[Req, Res]) -> Res:
        outcome = AskerLeft.code
        try:
            with self.ways.asking(worker.full_name) as trace:
                async with worker.ask(self.make(self._crashes, trace), 0) as answer:
                    result = await answer.result()
            outcome = "ended"
        except RequestError as error:
            outcome = error.code
            raise
        finally:
            self.ways.observer.call_ended(worker.full_name, outcome)
        assert result is not None  # it ends with a result or an error
        return result

    async def _first(self) -> RoutedAnswerer[Req, Res]:
        """Return the worker of the first attempt; raises `NotReady` if none comes up in time."""
        if (worker := await self._wait((), self.ways.limits.resume_s)) is None:
            raise NotReady(self.ways.none_up, client_detail=self.ways.none_up)
        return worker

    async def _next(self, error: RequestError, lost: set[str]) -> RoutedAnswerer[Req, Res]:
        """Wait for the next worker: another one, or after a pause any; raises `error` beyond a limit."""
        limits = self.ways.limits
        self._crashes += isinstance(error, EngineLost)
        self._losses += not isinstance(error, NotReady | Draining)
        if self._losses > limits.resumes_max or self._crashes > limits.crashes_max:
            raise error
        self._pause_s = min(2 * self._pause_s, limits.pause_max_s) or limits.pause_s
        worker = await self._wait(lost, self._pause_s) or await self._wait((), limits.resume_s)
        if worker is None:
            raise error
        self.ways.observer.call_resumed(error.code, 0)
        return worker

    async def _wait(self, excluded: Collection[str], within_s: float) -> RoutedAnswerer[Req, Res] | None:
        """Return a worker as soon as there is one, None if none comes in time."""
        with trio.move_on_after(within_s):
            await trio.lowlevel.checkpoint()
            while (worker := self._choose(excluded)) is None:
                await self.ways.wait_changed()
            return worker
        return None

    def _choose(self, excluded: Collection[str]) -> RoutedAnswerer[Req, Res] | None:
        """Return the preferred worker with room, or if all are full, the least busy one.

        In a full one the request waits in the worker's inbox, where the most urgent is next and owners take turns.
        """
        workers = [worker for worker in self.ways.workers() if worker.full_name not in excluded]
        loads = [(worker, worker.load) for worker in workers]
        if with_room := [(worker, load) for worker, load in loads if load.busy < load.slots]:
            return self.prefer(with_room)
        return least_busy(loads) if loads else None
