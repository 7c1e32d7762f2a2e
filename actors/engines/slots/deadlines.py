"""The deadlines of requests in slots, and the pace of a request's replies."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio
from attrs import define, field, frozen

RELEASE_S = 5.0


@frozen
class RequestDeadlines:
    """`[engine.NAME.deadlines]`: limits on an engine's time to the first token, between two tokens, and for an answer.

    `first_token_s` and `total_s` of a prompt that is queued behind a longer one start when the longer one has its first
    token or has ended.
    """

    first_token_s: float = 60.0  # longest time from having a slot to the first token; then `deadline_exceeded`
    gap_s: float = 20.0  # longest time between two tokens; then `deadline_exceeded`
    total_s: float = 600.0  # longest time from having a slot to the end of the answer; then `deadline_exceeded`


@frozen
class Deadlines(RequestDeadlines):
    """The limits on an engine's time: the configured ones, and the constants for the release of a slot.

    A slot that is not free after `release_s` is stuck. The engine is at fault once a slot has been stuck for `leak_s`,
    or once `stuck_max` slots are, or all.
    """

    release_s: float = RELEASE_S
    leak_s: float = 300.0
    stuck_max: int = 4


@define(eq=False)
class Pace:
    """The deadline of the next reply to one request, and the moment from which it is counted."""

    deadlines: Deadlines
    computable_from: Callable[[], float]  # the first moment at which the engine could compute the prompt
    started_at: float = field(factory=trio.current_time)
    first_at: float | None = None  # of the first reply
    last_at: float | None = None
    handed_over: bool = False  # a state was returned: no token follows, and its asker leaves once a decode has it
    rests: bool = False  # the engine holds its requests, so no deadline passes

    @property
    def began_at(self) -> float:
        """The moment from which the deadlines of the prompt and of the whole answer are counted."""
        return self.started_at if self.last_at is not None else max(self.started_at, self.computable_from())

    def until(self) -> float:
        """Return the deadline of the next reply, on Trio's clock."""
        if self.rests:
            return inf
        total = self.began_at + self.deadlines.total_s
        if self.last_at is None:
            return min(total, self.began_at + self.deadlines.first_token_s)
        if self.handed_over:
            return total
        return min(total, self.last_at + self.deadlines.gap_s)

    @property
    def waited_since(self) -> float:
        """The moment from which the next reply is waited for."""
        return self.began_at if self.last_at is None else self.last_at

    @property
    def waited_for(self) -> str:
        """The deadline that has passed, for an error: its seconds and its name."""
        if trio.current_time() >= self.began_at + self.deadlines.total_s:
            return f"{self.deadlines.total_s} s in all"
        if self.last_at is None:
            return f"{self.deadlines.first_token_s} s to its first token"
        return f"{self.deadlines.gap_s} s from one token to the next"

    def postpone(self, since: float) -> None:
        """Leave the time from `since` until now out of every deadline: the engine held its requests."""
        now = trio.current_time()
        self.started_at = _postponed(self.started_at, since, now)
        if self.last_at is not None:
            self.last_at = _postponed(self.last_at, since, now)


def _postponed(moment: float, since: float, until: float) -> float:
    return moment + until - max(since, moment)
