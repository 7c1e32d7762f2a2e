"""The one place that says no: whether a request may come in, and when to come back if it may not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from protocol.errors import Draining, NotReady, Overloaded


@define(eq=False)
class Gate:
    """Admits at most `requests_max` requests at a time; one that must wait waits `admit_s`, and then hears no."""

    requests_max: int
    admit_s: float
    waiting_max: int
    unready: Callable[[], str | None]  # why nothing can be served yet, None if it can
    draining: bool = False
    inside: int = 0
    waiting: int = 0
    _moved: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _emptied: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Be inside while the body runs; raises `Draining`, `NotReady` or `Overloaded` at the gate."""
        await self._enter()
        try:
            yield
        finally:
            self.inside -= 1
            self._wake_next()
            if not self.inside:
                self._emptied.unpark_all()

    def drain(self) -> None:
        """Admit nothing from now on; those who wait are told so."""
        self.draining = True
        self._moved.unpark_all()

    async def wait_empty(self) -> None:
        """Wait until nobody is inside."""
        await trio.lowlevel.checkpoint()
        while self.inside:
            await self._emptied.park()

    async def _enter(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        if self.waiting or self.inside >= self.requests_max:  # whoever waits was here first
            if self.waiting >= self.waiting_max:
                raise Overloaded(f"{self.inside} requests are being served and {self.waiting} wait")
            await self._wait()
        self.inside += 1
        self._wake_next()

    async def _wait(self) -> None:
        self.waiting += 1
        admitted = False
        try:
            with trio.move_on_after(self.admit_s):
                await self._moved.park()
                while self.inside >= self.requests_max and not self.draining:
                    await self._moved.park()
            self._check()
            if self.inside >= self.requests_max:
                raise Overloaded(f"no place was free within {self.admit_s} s")
            admitted = True
        finally:
            self.waiting -= 1
            if not admitted:
                self._wake_next()

    def _wake_next(self) -> None:
        if self.inside < self.requests_max:
            self._moved.unpark()

    def _check(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
        if (why := self.unready()) is not None:
            raise NotReady(why)
