"""Deadlines for the release of slots whose client has left, given the faults meanwhile."""

from __future__ import annotations

from math import inf

import trio
from attrs import Factory, define, evolve, frozen

from actors.engines.slots.deadlines import Deadlines

RELEASED_WITHIN_S = 2.0  # from leaving, or from the end of an answer, to a free slot
DELAYS = frozenset({"half-open front", "jump"})  # a disconnect is not noticed, or has no effect, before these are over
KEEPS = frozenset({"half-open line", "stuck", "jump", "trickles"})  # the engine keeps the slot, and is replaced
SWALLOWS = frozenset({"half-open front", "half-open line", "trickles"})  # an engine may compute on for a while


def kept_s(deadlines: Deadlines) -> float:
    """Return how long an engine may keep the slot of a request that has ended."""
    return deadlines.release_s + deadlines.leak_s


@frozen
class Period:
    """The time of one fault, in seconds of virtual time."""

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

    kept_s: float  # after which an engine that keeps a slot is stuck
    delays: frozenset[str] = DELAYS
    keeps: frozenset[str] = KEEPS
    swallows: frozenset[str] = SWALLOWS
    periods: list[Period] = Factory(list)  # in the order in which they begin
    jumped_s: float = 0.0  # by which the clock has jumped in all

    def wrong(self, kind: str, lasts_s: float) -> None:
        """Record that a fault begins now and lasts so long."""
        now = trio.current_time()
        self.periods.append(Period(kind, now, now + lasts_s))

    def jumped(self, jump_s: float) -> None:
        """Record that the clock has just jumped so far ahead."""
        now = trio.current_time()
        self.jumped_s += jump_s
        for index, period in enumerate(self.periods):
            if period.kind in self.delays and period.ends_at > now - jump_s:  # a stopped node waits as long again
                self.periods[index] = evolve(period, ends_at=period.ends_at + jump_s)
        self.periods.append(Period("jump", now - jump_s, now))

    def always(self, kind: str) -> None:
        """Record that a fault lasts for the whole run."""
        self.periods.append(Period(kind, -inf, inf))

    @property
    def swallowed(self) -> bool:
        """Whether an abort may have been late or lost, so that an engine computed on."""
        return any(period.kind in self.swallows for period in self.periods)

    def lately(self, kinds: frozenset[str], after_s: float) -> bool:
        """Whether one of these faults lasts, or has ended less than `after_s` ago."""
        now = trio.current_time()
        return any(each.kind in kinds and each.begins_at <= now <= each.ends_at + after_s for each in self.periods)

    def due(self, left_at: float, cancel_delay_s: float) -> tuple[float, list[str]]:
        """Return by when the slots of a client that left at `left_at` must be free, and the faults that delay it.

        `cancel_delay_s` is how long the `Cancel` waits behind earlier frames.
        """
        cancelled_at, late = left_at + cancel_delay_s, set()
        for period in self.periods:
            if period.kind in self.delays and self._overlaps(period, cancelled_at):
                cancelled_at = max(cancelled_at, period.ends_at)
                late.add(period.kind)
        # An answer may have ended before its client left, by a stop string, and its abort may have been lost.
        keeps = {
            period.kind
            for period in self.periods
            if period.kind in self.keeps and self._overlaps(period, left_at - self.kept_s, cancelled_at)
        }
        within_s = RELEASED_WITHIN_S + (self.kept_s if keeps else 0.0)
        return cancelled_at + within_s, sorted(late | keeps)

    async def wait_due(self, cancel_delay_s: float) -> list[str]:
        """Wait until the slots of a client that leaves now must be free; return the faults that delayed it."""
        left_at = trio.current_time()
        while True:
            due_at, late = self.due(left_at, cancel_delay_s)
            if due_at <= trio.current_time():
                return late
            await trio.sleep_until(due_at)

    def _overlaps(self, period: Period, since: float, until: float | None = None) -> bool:
        latest = (since if until is None else until) + RELEASED_WITHIN_S + self.kept_s
        return period.begins_at <= latest and period.ends_at >= since
