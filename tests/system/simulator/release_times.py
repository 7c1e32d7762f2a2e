"""Deadlines for the release of slots whose client has left, given the faults meanwhile."""

from __future__ import annotations

from math import inf

import trio
from attrs import Factory, define, evolve, frozen

from actors.engines.slots import Deadlines

RELEASED_WITHIN_S = 2.0  # from leaving, or from the end of an answer, to a free slot
DELAYS = frozenset({"half-open front", "jump"})  # nobody can hear of a leaving, or act on it, before these are over
KEEPS = frozenset({"half-open line", "stuck", "jump", "trickles"})  # the engine does not let go, and is replaced
SWALLOWS = frozenset({"half-open front", "half-open line", "trickles"})  # an engine may go on computing for a while


def kept_s(deadlines: Deadlines) -> float:
    """How long an engine may keep the slot of a request that has ended."""
    return deadlines.release_s + deadlines.leak_s


@frozen
class Period:
    """How long something was wrong, in seconds of virtual time."""

    kind: str
    begins_at: float
    ends_at: float


@define(eq=False)
class ReleaseDeadlines:
    """Records when aborts could not reach engines, or had no effect, and computes the deadlines that follow.

    An engine that keeps a slot for `release_s` and `leak_s` after an abort is stuck: its decoder falls, waits for
    another `release_s` for the other requests that it aborts, and then the supervisor stops the engine. So replacing
    takes `kept_s` and one `release_s` more than letting go, for which `RELEASED_WITHIN_S` leaves time.
    """

    kept_s: float  # how long a slot may be kept before the engine is at fault
    delays: frozenset[str] = DELAYS
    keeps: frozenset[str] = KEEPS
    swallows: frozenset[str] = SWALLOWS
    periods: list[Period] = Factory(list)  # in the order in which they begin
    jumped_s: float = 0.0  # how far the clock has jumped in all

    def wrong(self, kind: str, lasts_s: float) -> None:
        """Note that something is wrong from now on, for so long."""
        now = trio.current_time()
        self.periods.append(Period(kind, now, now + lasts_s))

    def jumped(self, jump_s: float) -> None:
        """Note that the clock has just jumped so far ahead."""
        now = trio.current_time()
        self.jumped_s += jump_s
        for at, period in enumerate(self.periods):
            if period.kind in self.delays and period.ends_at > now - jump_s:  # who has stood still waits as long again
                self.periods[at] = evolve(period, ends_at=period.ends_at + jump_s)
        self.periods.append(Period("jump", now - jump_s, now))

    def always(self, kind: str) -> None:
        """Note that something is wrong for good."""
        self.periods.append(Period(kind, -inf, inf))

    @property
    def swallowed(self) -> bool:
        """Whether an abort may have been late or lost, so that an engine computed for nobody."""
        return any(period.kind in self.swallows for period in self.periods)

    def due(self, left_at: float, way_s: float) -> tuple[float, list[str]]:
        """Return by when what was left at `left_at` must be free, as far as is known now, and what makes it late.

        `way_s` is how long the news of the leaving waits on its way behind what was said before.
        """
        told_at, late = left_at + way_s, set()
        for period in self.periods:
            if period.kind in self.delays and self._meets(period, told_at):
                told_at = max(told_at, period.ends_at)
                late.add(period.kind)
        # An answer may have ended before its client left, by a stop string, and its abort be one that nobody heard.
        keeps = {
            period.kind
            for period in self.periods
            if period.kind in self.keeps and self._meets(period, left_at - self.kept_s, told_at)
        }
        within_s = RELEASED_WITHIN_S + (self.kept_s if keeps else 0.0)
        return told_at + within_s, sorted(late | keeps)

    async def wait_due(self, way_s: float) -> list[str]:
        """Wait until what is left now must be free; return what made it late."""
        left_at = trio.current_time()
        while True:
            due_at, late = self.due(left_at, way_s)
            if due_at <= trio.current_time():
                return late
            await trio.sleep_until(due_at)

    def _meets(self, period: Period, since: float, until: float | None = None) -> bool:
        latest = (since if until is None else until) + RELEASED_WITHIN_S + self.kept_s
        return period.begins_at <= latest and period.ends_at >= since
