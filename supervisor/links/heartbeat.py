"""Heartbeats: whether the other end of a link is alive, by its silence and by what its kernel acknowledges.

A process that stands still (stopped, swapped out, in a long turn of its event loop) sends nothing, and neither does a
host that is gone. The process may go on where it was a moment later, so what it has asked for must not be ended: while
its kernel acknowledges bytes, the link is stalled, not lost. The loss of a host must be noticed soon.

An end that has stood still itself must not blame the others: what they have sent meanwhile is not read yet.
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

EARLY_S = 0.25  # so that thousands of links take a few turns a second
TURN_LINKS_MAX = 64  # served in one turn, which take about a millisecond


@frozen
class Heartbeat:
    """Limits of a heartbeat: how often an end sends, and after what silence the other is asked nothing, or is lost."""

    heartbeat_s: float = 1.0
    silent_s: float = 3.0
    stalled_s: float = 15.0  # where the other kernel still acknowledges what it is sent

    @property
    def early_s(self) -> float:
        """The seconds by which a heartbeat may be sent early, together with those of other links."""
        return min(EARLY_S, self.heartbeat_s / 4)


@define(eq=False)
class Liveness:
    """The state of the other end of one link, as far as its silence shows."""

    acknowledged_s: Callable[[], float | None]  # since the last acknowledgement that is due; None if it is unknown
    on_stalled: Callable[[], None]  # runs whenever `stalled` changes
    received_at: float = field(factory=trio.current_time)
    stalled: bool = False
    allowed_s: float = 0.0  # of silence, until the next check

    @property
    def silent_s(self) -> float:
        """For how long nothing has arrived."""
        return trio.current_time() - self.received_at

    def received(self) -> None:
        """Record that something has arrived."""
        self.received_at = trio.current_time()
        if self.stalled:
            self.stalled = False
            self.on_stalled()

    @property
    def check_at(self) -> float:
        """When silence would begin to matter, on Trio's clock."""
        return self.received_at + self.allowed_s

    def loss_reason(self, limits: Heartbeat, due_at: float, now: float, may_stall: bool) -> str | None:
        """Return why the other end counts as lost, None while it does not; this check was due at `due_at`."""
        if not self.stalled:
            self.allowed_s = limits.silent_s
        if now > due_at + limits.heartbeat_s / 10:  # this end stood still: what has arrived meanwhile is not read yet
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
        """Send a heartbeat if it is time and check the other end; return when to do so again, None if never."""

    def abort(self, reason: LocalViolation) -> None:
        """End the link at once."""


@define(eq=False)
class HeartbeatTask:
    """One task that sends heartbeats and checks silence for many links.

    It never waits for a link. Links that are due within `EARLY_S` of one another share one turn.
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
        """Serve the links that are due by now or soon, but no more than a short turn allows."""
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
