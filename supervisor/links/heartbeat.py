"""Heartbeats: the liveness of the other end of a link, by its silence and by its kernel's acknowledgements.

A stalled process (stopped, swapped out, in a long turn of its event loop) is as silent as a lost host. A stalled
process may continue a moment later, so its requests must not be ended: while its kernel acknowledges bytes, the link is
stalled, not lost. The loss of a host must be noticed soon.

An end that has stalled itself must not blame the others: their bytes of the meantime are not read yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

import trio
from attrs import define, field, frozen

from protocol.errors import LocalViolation

log = logging.getLogger(__name__)

EARLY_S = 0.25  # thousands of links share a few turns a second
TURN_LINKS_MAX = 64  # links in one turn; they take about a millisecond


@frozen
class Heartbeat:
    """Limits of a heartbeat: its interval, and the silence after which the other end is stalled or lost."""

    heartbeat_s: float = 1.0
    silent_s: float = 3.0
    stalled_s: float = 15.0  # the limit of silence while the other kernel acknowledges bytes

    @property
    def early_s(self) -> float:
        """The seconds by which a heartbeat may be early, to share a turn with other links."""
        return min(EARLY_S, self.heartbeat_s / 4)


@define(eq=False)
class Liveness:
    """The state of the other end of one link, judged by its silence."""

    acknowledged_s: Callable[[], float | None]  # seconds since the last acknowledgement due; None if unknown
    on_stalled: Callable[[], None]  # runs whenever `stalled` changes
    received_at: float = field(factory=trio.current_time)
    stalled: bool = False
    allowed_s: float = 0.0  # silence until the next check

    @property
    def silent_s(self) -> float:
        """The seconds since bytes arrived."""
        return trio.current_time() - self.received_at

    def received(self) -> None:
        """Record the arrival of bytes."""
        self.received_at = trio.current_time()
        if self.stalled:
            self.stalled = False
            self.on_stalled()

    @property
    def check_at(self) -> float:
        """The end of the allowed silence, on Trio's clock."""
        return self.received_at + self.allowed_s

    def loss_reason(self, limits: Heartbeat, due_at: float, now: float, may_stall: bool) -> str | None:
        """Return the reason why the other end counts as lost, None while it does not; the check was due at `due_at`."""
        if not self.stalled:
            self.allowed_s = limits.silent_s
        # A late check means that this end stalled: give the other end's unread bytes one more `heartbeat_s`.
        if now > due_at + limits.heartbeat_s / 10:
            self.received_at = max(self.received_at, now - self.allowed_s + limits.heartbeat_s)
        if now < self.check_at:
            return None
        acknowledged_s = self.acknowledged_s()
        # A live kernel acknowledges within milliseconds, and this end sends something every `heartbeat_s`.
        if acknowledged_s is None or acknowledged_s > limits.heartbeat_s or not may_stall:
            return f"the other end has been silent for {self.allowed_s:g} s"
        if self.allowed_s >= limits.stalled_s:
            return f"the other end has stood still for {self.allowed_s:g} s"
        self.allowed_s = min(self.allowed_s + limits.heartbeat_s, limits.stalled_s)
        if not self.stalled:
            self.stalled = True
            self.on_stalled()
        return None


class BeatingLink(Protocol):
    """The part of a link that `HeartbeatTask` needs."""

    def beat(self, due_at: float, now: float) -> float | None:
        """Send a heartbeat if it is time and check the other end; return the time of the next call, None if never."""

    def abort(self, reason: LocalViolation) -> None:
        """End the link at once."""


@define(eq=False)
class HeartbeatTask:
    """One task that sends heartbeats and checks silence for many links.

    It never waits for a link. Links due within `EARLY_S` of one another share one turn.
    """

    _due: list[tuple[float, int, BeatingLink]] = field(factory=list)  # a heap
    _numbers: Iterator[int] = field(factory=count)
    _sleeping: trio.CancelScope = field(factory=trio.CancelScope)

    def add(self, link: BeatingLink, due_at: float) -> None:
        """Serve a link from `due_at` on, until it ends."""
        heappush(self._due, (due_at, next(self._numbers), link))
        self._sleeping.deadline = min(self._sleeping.deadline, due_at)

    async def run(self) -> None:
        """Serve each link when it is due, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._due[0][0] if self._due else inf) as self._sleeping:
                await trio.sleep_forever()
            self._beat(trio.current_time())

    def _beat(self, now: float) -> None:
        """Serve the links due now or soon, at most `TURN_LINKS_MAX`."""
        due: list[tuple[float, int, BeatingLink]] = []
        while self._due and self._due[0][0] <= now + EARLY_S and len(due) < TURN_LINKS_MAX:
            due.append(heappop(self._due))
        for due_at, number, link in due:
            try:
                again_at = link.beat(due_at, now)
            except Exception:
                log.exception("a bug ended a link")
                link.abort(LocalViolation("its heartbeat failed by a bug of this node"))
            else:
                if again_at is not None:
                    heappush(self._due, (again_at, number, link))
