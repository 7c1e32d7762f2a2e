"""An inbox in which the most urgent call is first, whenever it came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic

import trio
from attrs import define, field

from actors._kit import Address, Call, Rep, Req, Res


@define(eq=False)
class _Waiting(Generic[Req, Rep, Res]):
    call: Call[Req, Rep, Res]
    inside: trio.Event = field(factory=trio.Event)  # there was room for it
    gone: bool = False


@define(eq=False)
class Queue(Generic[Req, Rep, Res]):
    """Lets `size` calls wait, at least one: those of higher `urgency` before others, of equal ones the older first.

    Whoever asks beyond that waits for room in the same order. It may have several receivers.
    """

    size: int
    urgency: Callable[[Req], int]
    _inside: list[tuple[int, int, _Waiting[Req, Rep, Res]]] = field(factory=list)
    _outside: list[tuple[int, int, _Waiting[Req, Rep, Res]]] = field(factory=list)
    _numbers: Iterator[int] = field(factory=count)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def send(self, call: Call[Req, Rep, Res]) -> None:
        """Put a call in, waiting while there is no room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waiting = _Waiting(call)
        heappush(self._outside, (-self.urgency(call.request), next(self._numbers), waiting))
        self._move()
        try:
            await waiting.inside.wait()
        finally:
            waiting.gone = not waiting.inside.is_set()

    async def receive(self) -> Call[Req, Rep, Res]:
        """Wait for the next call, and take it."""
        await trio.lowlevel.checkpoint()
        while not self._inside:
            await self._news.park()
        _, _, waiting = heappop(self._inside)
        self._move()
        return waiting.call

    @property
    def waiting(self) -> tuple[int, int]:
        """How many calls wait inside, and how many askers for room."""
        return len(self._inside), sum(not each.gone for _, _, each in self._outside)

    def _move(self) -> None:
        while self._outside and len(self._inside) < self.size:
            entry = heappop(self._outside)
            if not entry[2].gone:
                heappush(self._inside, entry)
                entry[2].inside.set()
                self._news.unpark_all()


def queue(size: int, urgency: Callable[[Req], int]) -> tuple[Address[Req, Rep, Res], Queue[Req, Rep, Res]]:
    """Return the address and the inbox of an actor, or of several, that let `size` calls wait in order of urgency."""
    made: Queue[Req, Rep, Res] = Queue(size, urgency)
    return Address(made), made
