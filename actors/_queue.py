"""An inbox in which the most urgent call is first, whenever it came."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic

import trio
from attrs import define, field

from actors._kit import Address, Call, Rep, Req, Res
from protocol.errors import RequestError


@define(eq=False)
class _Waiting(Generic[Req, Rep, Res]):
    call: Call[Req, Rep, Res]
    inside: trio.Event = field(factory=trio.Event)  # there was room for it, or a receiver


@define(eq=False)
class Queue(Generic[Req, Rep, Res]):
    """Lets `size` calls wait, at least one: those of higher `urgency` before others, of equal ones the older first.

    Whoever asks beyond that waits for room in the same order. Each of its receivers takes the first of all, even of
    those who wait for room.
    """

    size: int
    urgency: Callable[[Req], int]
    # Both in order, not heaps: many askers can leave at once, and each must be found quickly to be forgotten.
    _inside: list[tuple[int, int, _Waiting[Req, Rep, Res]]] = field(factory=list)
    _outside: list[tuple[int, int, _Waiting[Req, Rep, Res]]] = field(factory=list)
    _numbers: Iterator[int] = field(factory=count)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def send(self, call: Call[Req, Rep, Res]) -> None:
        """Put a call in, waiting while there is no room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waiting = _Waiting(call)
        entry = (-self.urgency(call.request), next(self._numbers), waiting)
        insort(self._outside, entry)
        self._move()
        try:
            await waiting.inside.wait()
        finally:
            if not waiting.inside.is_set():
                del self._outside[bisect_left(self._outside, entry)]

    async def receive(self) -> Call[Req, Rep, Res]:
        """Wait for the next call, and take it."""
        await trio.lowlevel.checkpoint()
        while not self._inside:
            await self._news.park()
        ahead = self._outside and self._outside[0] < self._inside[0]
        _, _, waiting = (self._outside if ahead else self._inside).pop(0)
        waiting.inside.set()
        self._move()
        return waiting.call

    def turn_away(self, error: RequestError) -> None:
        """Fail every call that waits, inside and for room; they can be asked elsewhere."""
        waiting = [entry[2] for entry in (*self._inside, *self._outside)]
        self._inside.clear()
        self._outside.clear()
        for each in waiting:
            each.inside.set()
            each.call.answer.fail(error)

    @property
    def waiting(self) -> tuple[int, int]:
        """How many calls wait inside, and how many askers for room."""
        return len(self._inside), len(self._outside)

    def _move(self) -> None:
        while self._outside and len(self._inside) < self.size:
            entry = self._outside.pop(0)
            insort(self._inside, entry)
            entry[2].inside.set()
            self._news.unpark_all()


def queue(size: int, urgency: Callable[[Req], int]) -> tuple[Address[Req, Rep, Res], Queue[Req, Rep, Res]]:
    """Return the address and the inbox of an actor, or of several, that let `size` calls wait in order of urgency."""
    made: Queue[Req, Rep, Res] = Queue(size, urgency)
    return Address(made), made
