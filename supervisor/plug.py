"""Where a child that comes and goes offers what its siblings need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, field

T = TypeVar("T")


@define(eq=False)
class Plug(Generic[T]):
    """Holds a thing while the life that offers it lasts."""

    changed: trio.lowlevel.ParkingLot | None = None  # where others wait for something to come or go
    last: T | None = None  # stays when the life ends, for what outlives it: names, limits
    lacks: str | None = None  # what must come before there is anything to offer
    _now: T | None = None
    _offered: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @contextmanager
    def offering(self, thing: T) -> Iterator[None]:
        """Offer `thing` while the body runs."""
        self._now = self.last = thing
        self._offered.unpark_all()
        self._change()
        try:
            yield
        finally:
            if self._now is thing:
                self._now = None
                self._change()

    def withdraw(self) -> None:
        """Offer nothing more, though the life that offered it goes on."""
        self._now = None
        self._change()

    @property
    def now(self) -> T | None:
        """What is offered now, if anything is."""
        return self._now

    def lack(self, what: str | None) -> None:
        """Say what must come first, None if nothing must."""
        if what != self.lacks:
            self.lacks = what
            self._change()

    async def wait(self) -> T:
        """Wait until something is offered, and return it."""
        await trio.lowlevel.checkpoint()
        while self._now is None:
            await self._offered.park()
        return self._now

    def _change(self) -> None:
        if self.changed is not None:
            self.changed.unpark_all()
