"""The one place that says no: whether a request may come in, and when to come back if it may not."""

from __future__ import annotations

from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from protocol.errors import Draining, NotReady, Overloaded


@define(order=False, eq=False)
class _Waiter:
    """One request that waits; who leaves the line early leaves no hole in it."""

    priority: int
    woken: trio.Event = field(factory=trio.Event)
    has_place: bool = False
    displaced: bool = False


@define(eq=False)
class Gate:
    """Admits at most `requests_max` requests at a time; one that must wait waits `admit_s`, and then hears no.

    Of those who wait the one with the highest priority goes first, and of equals the one that came first. When
    `waiting_max` wait, one more displaces the one that would go last if that has a lower priority, and else hears no.
    """

    requests_max: int
    admit_s: float
    waiting_max: int
    unready: Callable[[], str | None]  # why nothing can be served yet, None if it can
    draining: bool = False
    inside: int = 0
    _line: list[_Waiter] = field(factory=list)
    _emptied: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    @asynccontextmanager
    async def admitted(self, priority: int = 0) -> AsyncIterator[None]:
        """Be inside while the body runs; raises `Draining`, `NotReady` or `Overloaded` at the gate."""
        await self._enter(priority)
        try:
            yield
        finally:
            self._leave()

    def change(self, requests_max: int, admit_s: float, waiting_max: int) -> None:
        """Live by other limits from now on; those who are inside or in line stay where they are."""
        self.requests_max, self.admit_s, self.waiting_max = requests_max, admit_s, waiting_max
        while self._line and self.inside < requests_max:
            self.inside += 1  # a place more, for the first in line
            self._leave()

    def drain(self) -> None:
        """Admit nothing from now on; those who wait are told so."""
        self.draining = True
        for waiter in self._line:
            waiter.woken.set()

    async def wait_empty(self) -> None:
        """Wait until nobody is inside."""
        await trio.lowlevel.checkpoint()
        while self.inside:
            await self._emptied.park()

    async def _enter(self, priority: int) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        if not self._line and self.inside < self.requests_max:  # whoever waits was here first
            self.inside += 1
            return
        if len(self._line) >= self.waiting_max:
            self._displace(priority)
        await self._wait(_Waiter(priority))  # in this very turn, so that the line is never longer than it may be

    def _displace(self, priority: int) -> None:
        """Make room in a full line for one with this priority; raises `Overloaded` if nobody there has a lower one."""
        if not self._line or self._line[-1].priority >= priority:
            raise Overloaded(f"{self.inside} requests are being served and {len(self._line)} wait")
        waiter = self._line.pop()
        waiter.displaced = True
        waiter.woken.set()

    async def _wait(self, waiter: _Waiter) -> None:
        """Wait in line until a place is given; a place that was given and cannot be taken goes to the next one."""
        insort(self._line, waiter, key=lambda each: -each.priority)
        admitted = False
        try:
            with trio.move_on_after(self.admit_s):
                await waiter.woken.wait()
            self._check()
            if waiter.displaced:
                raise Overloaded("as many requests wait as may, and one with a higher priority displaced this one")
            if not waiter.has_place:
                raise Overloaded(f"no place was free within {self.admit_s} s")
            admitted = True
        finally:
            if waiter.has_place and not admitted:
                self._leave()
            elif not (waiter.has_place or waiter.displaced):
                self._line.remove(waiter)

    def _leave(self) -> None:
        """Give the place to whoever is first in line, in this very turn, so that nobody comes between."""
        self.inside -= 1
        if self._line and self.inside < self.requests_max:
            waiter = self._line.pop(0)
            waiter.has_place = True
            self.inside += 1
            waiter.woken.set()
        if not self.inside:
            self._emptied.unpark_all()

    def _check(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
        if (why := self.unready()) is not None:
            raise NotReady(why)
