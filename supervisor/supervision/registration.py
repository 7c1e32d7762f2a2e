"""Where a child that comes and goes offers what its siblings need, and says why while there is nothing to offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, field, frozen

from protocol.errors import StartFailed
from supervisor.supervision.changes import Changes

T = TypeVar("T")
WHY_LENGTH_MAX = 500


@frozen
class Failure:
    """Why what was offered is gone or never came, and when it is tried again, on Trio's clock."""

    why: str
    retry_at: float
    at_start: bool  # it had not been ready

    def __str__(self) -> str:
        wait_s = self.retry_at - trio.current_time()
        return f"failed: {self.why}; next try {f'in {wait_s:.0f} s' if wait_s >= 1 else 'now'}"


@define(eq=False)
class Registration(Generic[T]):
    """Holds a thing while the life that offers it lasts."""

    changed: Changes | None = None  # where others wait for something to come or go
    last: T | None = None  # stays when the life ends, for what outlives it: names, limits
    lacks: str | None = None  # what must come before there is anything to offer
    failure: Failure | None = None  # since the life that offered it, or was to offer it, failed
    _offers: bool = False  # this life has offered something
    _now: T | None = None
    _offered: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @contextmanager
    def publish(self, thing: T) -> Iterator[None]:
        """Offer `thing` while the body runs."""
        self._now = self.last = thing
        self._offers, self.failure = True, None
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

    def failed(self, why: str, wait_s: float) -> None:
        """Note that whoever offers failed, and is tried again after a wait."""
        self.failure = Failure(why[:WHY_LENGTH_MAX], trio.current_time() + wait_s, at_start=not self._offers)
        self._offers = False
        self._offered.unpark_all()  # whoever waits for it may not want to, now
        self._change()

    @property
    def how(self) -> str:
        """How it is while nothing is offered, as the end of a sentence."""
        if self.failure is not None and self.lacks is None:
            return str(self.failure)
        return f"is starting{'' if self.lacks is None else f': {self.lacks}'}"

    @property
    def why(self) -> str:
        """The same for whoever hears it later: without the time, and nothing where something is offered."""
        if self._now is not None:
            return ""
        return self.how if self.failure is None or self.lacks is not None else f"failed: {self.failure.why}"

    async def wait(self) -> T:
        """Wait until something is offered, and return it."""
        await trio.lowlevel.checkpoint()
        while self._now is None:
            await self._offered.park()
        return self._now

    async def started(self) -> T:
        """Wait as `wait` does; raises `StartFailed` if what is to offer it could not start when it last tried."""
        await trio.lowlevel.checkpoint()
        while self._now is None:
            if self.failure is not None and self.failure.at_start:
                raise StartFailed(self.failure.why)
            await self._offered.park()
        return self._now

    def _change(self) -> None:
        if self.changed is not None:
            self.changed.unpark_all()
