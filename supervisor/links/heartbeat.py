"""Whether the other end of a link lives: how long it has been silent, and whether its kernel still acknowledges bytes.

A process that stands still (stopped, swapped out, in a long turn) says nothing, and neither does a host that is gone.
The first goes on where it was a moment later, so what it has asked for is not ended while its kernel answers for it.
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

from protocol.errors import PeerLost

log = logging.getLogger(__name__)

EARLY_S = 0.25  # so that thousands of links take a few turns a second
TURN_LINKS_MAX = 64


@frozen
class Heartbeat:
    """How often an end says that it is alive, and after how long a silence the other is asked nothing, or is lost."""

    heartbeat_s: float = 1.0
    silent_s: float = 3.0
    stalled_s: float = 15.0  # of one whose kernel still acknowledges what it is sent

    @property
    def early_s(self) -> float:
        """How much sooner a beat may be said, together with those of other links."""
        return min(EARLY_S, self.heartbeat_s / 4)


@define(eq=False)
class Liveness:
    """What one end of a link knows of the other's life."""

    acknowledged_s: Callable[[], float | None]  # since the last acknowledgement that is due; None if nobody can know
    changed: Callable[[], None]  # runs when the other end begins to stand still, and when it is heard again
    heard_at: float = field(factory=trio.current_time)
    stalled: bool = False
    allowed_s: float = 0.0  # of silence, until it is looked at again

    @property
    def silent_s(self) -> float:
        """For how long nothing has come from the other end."""
        return trio.current_time() - self.heard_at

    def heard(self) -> None:
        """Note that something has come."""
        self.heard_at = trio.current_time()
        if self.stalled:
            self.stalled = False
            self.changed()

    @property
    def look_at(self) -> float:
        """When silence would begin to matter."""
        return self.heard_at + self.allowed_s

    def lost(self, heart: Heartbeat, due_at: float, now: float, may_stall: bool) -> str | None:
        """Return why the other end counts as lost, None while it does not; this look was to be at `due_at`."""
        if not self.stalled:
            self.allowed_s = heart.silent_s
        if now > due_at + heart.heartbeat_s / 10:
            # It was this end that stood still: what has come meanwhile lies unread, and counts.
            self.heard_at = max(self.heard_at, now - self.allowed_s + heart.heartbeat_s)
        if now < self.look_at:
            return None
        acknowledged_s = self.acknowledged_s()
        # A kernel that lives acknowledges within milliseconds, and this end sends something in every beat.
        if acknowledged_s is None or acknowledged_s > heart.heartbeat_s or not may_stall:
            return f"the other end has been silent for {self.allowed_s:g} s"
        if self.allowed_s >= heart.stalled_s:
            return f"the other end has stood still for {self.allowed_s:g} s"
        self.allowed_s = min(self.allowed_s + heart.heartbeat_s, heart.stalled_s)
        if not self.stalled:
            self.stalled = True
            self.changed()
        return None


class Tended(Protocol):
    """A link as `HeartbeatTask` has it."""

    def tend(self, due_at: float, now: float) -> float | None:
        """Say that this end is alive, look whether the other is; return when to do so again, None if never."""

    def lose(self, why: PeerLost) -> None:
        """End the link."""


@define(eq=False)
class HeartbeatTask:
    """One task that says for many links that this end is alive, and looks whether their other ends are.

    It never waits for a link. Those that are due within `EARLY_S` of one another are tended in one turn.
    """

    _due: list[tuple[float, int, Tended]] = field(factory=list)  # a heap
    _numbers: Iterator[int] = field(factory=count)
    _asleep: trio.CancelScope = field(factory=trio.CancelScope)

    def add(self, link: Tended, due_at: float) -> None:
        """Tend a link from a time on, until it asks for no more."""
        heappush(self._due, (due_at, next(self._numbers), link))
        self._asleep.deadline = min(self._asleep.deadline, due_at)

    async def run(self) -> None:
        """Tend each link when it is due, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._due[0][0] if self._due else inf) as self._asleep:
                await trio.sleep_forever()
            self._tend(trio.current_time())

    def _tend(self, now: float) -> None:
        """Tend those that are due by now or soon, but no more of them than take a millisecond."""
        due: list[tuple[float, int, Tended]] = []
        while self._due and self._due[0][0] <= now + EARLY_S and len(due) < TURN_LINKS_MAX:
            due.append(heappop(self._due))
        for due_at, number, link in due:
            try:
                again_at = link.tend(due_at, now)
            except Exception:
                log.exception("a bug ended a link")
                link.lose(PeerLost("a bug of this end"))
            else:
                if again_at is not None:
                    heappush(self._due, (again_at, number, link))
