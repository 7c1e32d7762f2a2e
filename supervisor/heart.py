"""Whether the other end of a link lives: how long it has been silent, and whether its kernel still acknowledges bytes.

A process that stands still (stopped, swapped out, in a long turn) says nothing, and neither does a host that is gone.
The first goes on where it was a moment later, so what it has asked for is not ended while its kernel answers for it.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field, frozen


@frozen
class Heart:
    """How often an end says that it is alive, and after how long a silence the other is asked nothing, or is lost."""

    beat_s: float = 1.0
    silent_s: float = 3.0
    stalled_s: float = 15.0  # of one whose kernel still acknowledges what it is sent


@define(eq=False)
class Liveness:
    """What one end of a link knows of the other's life."""

    acknowledged_s: Callable[[], float | None]  # since the last acknowledgement that is due; None if nobody can know
    changed: Callable[[], None]  # runs when the other end begins to stand still, and when it is heard again
    heard_at: float = field(factory=trio.current_time)
    stalled: bool = False

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

    async def wait_lost(self, heart: Heart, may_stall: Callable[[], bool]) -> str:
        """Wait until the other end counts as lost, and return why; one that has `stalled` is looked at once a beat."""
        allowed_s = heart.silent_s
        while True:
            look_at = self.heard_at + allowed_s
            await trio.sleep_until(look_at)
            if trio.current_time() > look_at + heart.beat_s / 10:
                # It was this end that stood still: what has come meanwhile lies unread, and counts.
                self.heard_at = max(self.heard_at, trio.current_time() - allowed_s + heart.beat_s)
            if not self.stalled:
                allowed_s = heart.silent_s
            if trio.current_time() < self.heard_at + allowed_s:
                continue
            acknowledged_s = self.acknowledged_s()
            # A kernel that lives acknowledges within milliseconds, and this end sends something in every beat.
            if acknowledged_s is None or acknowledged_s > heart.beat_s or not may_stall():
                return f"the other end has been silent for {allowed_s:g} s"
            if allowed_s >= heart.stalled_s:
                return f"the other end has stood still for {allowed_s:g} s"
            allowed_s = min(allowed_s + heart.beat_s, heart.stalled_s)
            if not self.stalled:
                self.stalled = True
                self.changed()
