"""A registered name: the current value that a supervised child publishes while it lives.

A child that is restarted is a new object each time, so nobody may keep a reference to it. What outlives its restarts
is a `Registration`, made together with the tree: the child publishes its value there for as long as it can be used,
its siblings read `current` or wait for it, and while there is none, the registration knows why.

A value may live and yet be out of service for a while, such as an engine whose weights are being replaced: then
`current` is None and the reason is told, but its publisher and whoever serves it go on, and use `live`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, field, frozen

from protocol.errors import StartFailed

T = TypeVar("T")
REASON_LENGTH_MAX = 500
OUT_OF_SERVICE = "is out of service"
"""The beginning of the status of what lives and is not to be used."""


def _ignore() -> None:
    """Do nothing with a change."""


@frozen
class Failure:
    """Why the publisher failed, and when it is restarted, on Trio's clock."""

    reason: str
    retry_at: float
    at_start: bool  # it failed before it had published anything

    def __str__(self) -> str:
        wait_s = self.retry_at - trio.current_time()
        return f"failed: {self.reason}; next try {f'in {wait_s:.0f} s' if wait_s >= 1 else 'now'}"


@define(eq=False)
class Registration(Generic[T]):
    """A value that exists while the child that publishes it lives; `on_change` is called at each change."""

    on_change: Callable[[], None] = _ignore
    last: T | None = None  # the latest value, kept when its publisher ends: for its names and limits
    blocked_by: str | None = None  # what the publisher waits for before it can publish
    failure: Failure | None = None  # of the publisher, until something is published again
    _published: bool = False  # by the present life of the publisher
    _current: T | None = None
    _out_of_service: list[str] = field(factory=list)  # the reasons that hold
    _waiting: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @contextmanager
    def publish(self, value: T) -> Iterator[None]:
        """Publish `value` while the body runs."""
        self._current = self.last = value
        self._published, self.failure = True, None
        self._waiting.unpark_all()
        self.on_change()
        try:
            yield
        finally:
            if self._current is value:
                self._current = None
                self.on_change()

    def withdraw(self) -> None:
        """Stop publishing, although the body of `publish` still runs."""
        self._current = None
        self.on_change()

    @contextmanager
    def out_of_service(self, reason: str) -> Iterator[None]:
        """Keep the value out of service while the body runs, whether or not it lives; several may do so at a time."""
        reason = reason[:REASON_LENGTH_MAX]
        self._out_of_service.append(reason)
        self.on_change()
        try:
            yield
        finally:
            self._out_of_service.remove(reason)
            self.on_change()

    @property
    def current(self) -> T | None:
        """The published value, None if there is none or it is out of service."""
        return None if self._out_of_service else self._current

    @property
    def in_service(self) -> bool:
        """Whether nobody keeps the value out of service, if there is one."""
        return not self._out_of_service

    @property
    def live(self) -> T | None:
        """The published value, be it in service or not; None if there is none."""
        return self._current

    def set_blocked_by(self, reason: str | None) -> None:
        """State what the publisher waits for; None if for nothing."""
        if reason != self.blocked_by:
            self.blocked_by = reason
            self.on_change()

    def note_failure(self, reason: str, wait_s: float) -> None:
        """Note that the publisher failed, and is restarted after `wait_s` seconds."""
        retry_at = trio.current_time() + wait_s
        self.failure = Failure(reason[:REASON_LENGTH_MAX], retry_at, at_start=not self._published)
        self._published = False
        self._waiting.unpark_all()  # `wait_started` raises
        self.on_change()

    @property
    def status_text(self) -> str:
        """The state while there is no `current`, as the end of a sentence."""
        if self._current is not None and self._out_of_service:
            return f"{OUT_OF_SERVICE}: {self._out_of_service[0]}"
        if self.failure is not None and self.blocked_by is None:
            return str(self.failure)
        return f"is starting{'' if self.blocked_by is None else f': {self.blocked_by}'}"

    @property
    def unavailable_reason(self) -> str:
        """The same without times, for nodes that read it later; empty while there is a `current`."""
        if self._current is not None:
            return self.status_text if self._out_of_service else ""
        if self.failure is None or self.blocked_by is not None:
            return self.status_text
        return f"failed: {self.failure.reason}"

    async def wait(self) -> T:
        """Wait until something is published, be it in service or not, and return it."""
        await trio.lowlevel.checkpoint()
        while self._current is None:
            await self._waiting.park()
        return self._current

    async def wait_started(self) -> T:
        """Wait like `wait`; raises `StartFailed` if the publisher's latest start failed."""
        await trio.lowlevel.checkpoint()
        while self._current is None:
            if self.failure is not None and self.failure.at_start:
                raise StartFailed(self.failure.reason)
            await self._waiting.park()
        return self._current
