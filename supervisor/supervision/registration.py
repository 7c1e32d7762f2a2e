"""A registered name: the current value of a supervised child, published while it lives.

A restarted child is a new object each time, so siblings may keep no reference to it. A `Registration`, made together
with the tree, outlives the restarts: the child publishes its value there while it can be used, its siblings read
`current` or wait for it, and without a value the registration has the reason.

A value may live and yet be out of service for a while, such as an engine during the replacement of its weights: then
`current` is None with a reason, but its publisher and its service continue, and use `live`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, evolve, field, frozen

from protocol.errors import StartFailed

T = TypeVar("T")
REASON_LENGTH_MAX = 500
OUT_OF_SERVICE = "is out of service"
"""The beginning of the status of a live value out of service."""


def _ignore() -> None:
    """Do nothing with a change."""


@frozen
class Failure:
    """The reason of the publisher's failure, and the time of its restart on Trio's clock."""

    reason: str
    retry_at: float
    at_start: bool  # it failed before it had published anything

    def __str__(self) -> str:
        wait_s = self.retry_at - trio.current_time()
        return f"failed: {self.reason}; next try {f'in {wait_s:.0f} s' if wait_s >= 1 else 'now'}"


@define(eq=False)
class Registration(Generic[T]):
    """A value that exists while its publisher lives; `on_change` is called at each change."""

    on_change: Callable[[], None] = _ignore
    last: T | None = None  # the latest value, kept when its publisher ends: for its names and limits
    blocked_by: str | None = None  # the publisher's reason to wait before it can publish
    failure: Failure | None = None  # the publisher's last failure, until it publishes again
    _published: bool = False  # whether the present life of the publisher has published
    _current: T | None = None
    _out_of_service: list[str] = field(factory=list)  # the present reasons
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
        """Withdraw the value before the end of the body of `publish`."""
        self._current = None
        self.on_change()

    @contextmanager
    def out_of_service(self, reason: str) -> Iterator[None]:
        """Keep the value out of service while the body runs, even without a live value; several bodies may overlap."""
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
        """Whether a value, if there is one, is in service."""
        return not self._out_of_service

    @property
    def live(self) -> T | None:
        """The published value, in service or not; None if there is none."""
        return self._current

    def set_blocked_by(self, reason: str | None) -> None:
        """Set the publisher's reason to wait; None if it does not wait."""
        if reason != self.blocked_by:
            self.blocked_by = reason
            self.on_change()

    def note_failure(self, reason: str, wait_s: float) -> None:
        """Record a failure of the publisher, and its restart after `wait_s` seconds."""
        retry_at = trio.current_time() + wait_s
        self.failure = Failure(reason[:REASON_LENGTH_MAX], retry_at, at_start=not self._published)
        self._published = False
        self._waiting.unpark_all()  # `wait_started` raises
        self.on_change()

    def explain_failure(self, reason: str) -> None:
        """Replace the reason of the last failure, if nothing was published since, by that of its cause."""
        if self.failure is not None:
            self.failure = evolve(self.failure, reason=reason[:REASON_LENGTH_MAX])
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
        """The state without times, for other nodes, which read it later; empty while there is a `current`."""
        if self._current is not None:
            return self.status_text if self._out_of_service else ""
        if self.failure is None or self.blocked_by is not None:
            return self.status_text
        return f"failed: {self.failure.reason}"

    async def wait(self) -> T:
        """Wait for a published value, in service or not, and return it."""
        await trio.lowlevel.checkpoint()
        while self._current is None:
            await self._waiting.park()
        return self._current

    async def wait_started(self) -> T:
        """Wait as `wait` does; raises `StartFailed` if the publisher's latest start failed."""
        await trio.lowlevel.checkpoint()
        while self._current is None:
            if self.failure is not None and self.failure.at_start:
                raise StartFailed(self.failure.reason)
            await self._waiting.park()
        return self._current
