"""Outlier ejection: a worker that keeps failing is set aside for a while, then tried by one request at a time.

As a circuit breaker has: *closed*, requests flow; *open*, none does until its time is over, twice as long each time;
*half-open*, one request at a time tries whether it is well again. A pair of workers has a breaker of its own.
Pure: time comes in as a parameter, and there is no chance in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Annotated

from attrs import define, field, frozen

from protocol.dialects.options import Within


@frozen
class Ejection:
    """When a worker is set aside, for how long, and how much of a pool may be at once."""

    failures_max: Annotated[int, Within(at_least=1, at_most=1_000)] = 5  # in a row
    window: Annotated[int, Within(at_least=1, at_most=1_000)] = 20  # answers that a rate of failures is taken from
    rate_max: Annotated[float, Within(above=0, at_most=1)] = 0.5  # of failures among those
    aside_s: Annotated[float, Within(above=0, at_most=86_400)] = 10.0  # the first time; then twice as long each time
    aside_max_s: Annotated[float, Within(above=0, at_most=86_400)] = 300.0
    share_max: Annotated[float, Within(at_least=0, at_most=1)] = (
        0.5  # of the workers of one leg; one alone is never set aside
    )


@frozen
class Aside:
    """A worker, or a pair, that is set aside: why, and for how many seconds more; 0 if it is being tried again."""

    name: str
    why: str
    for_s: float


@define(eq=False)
class _Breaker:
    kind: str
    recent: deque[bool] = field(factory=deque)  # whether each of the last answers was a failure
    in_a_row: int = 0
    opened: int = 0  # so many times in a row
    until: float = -inf  # it is open; from then on half-open
    closed: bool = True
    closed_at: float = -inf
    why: str = ""
    trying: bool = False

    def note(self, window: int, *, failed: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if failed else 0
        self.recent.append(failed)
        while len(self.recent) > window:
            self.recent.popleft()

    def fails(self, limits: Ejection) -> bool:
        """Whether it fails often enough to be opened."""
        often = len(self.recent) >= limits.window and sum(self.recent) > limits.rate_max * len(self.recent)
        return self.in_a_row >= limits.failures_max or often


@define(eq=False)
class Outliers:
    """Which workers of a pool are set aside."""

    _breakers: dict[str, _Breaker] = field(factory=dict)
    _aside: set[str] = field(factory=set)  # those that are not closed

    def failed(self, name: str, why: str, kind: str, peers: int, limits: Ejection, now: float) -> bool:
        """Note a failure of one of `peers` of a `kind`, who can do the same job; return whether it is set aside now."""
        breaker = self._breakers.setdefault(name, _Breaker(kind))
        if not breaker.closed:
            if now < breaker.until:  # it was asked before it was set aside
                return False
            self._open(name, breaker, why, limits, now)
            return True
        breaker.note(limits.window, failed=True)
        if not breaker.fails(limits):
            return False
        others_aside = sum(1 for each in self._aside if self._breakers[each].kind == kind)
        if others_aside + 1 > limits.share_max * peers:
            return False
        self._open(name, breaker, why, limits, now)
        return True

    def answered(self, name: str, limits: Ejection, now: float) -> bool:
        """Note an answer that was whole; return whether that ends the time for which its worker was set aside."""
        breaker = self._breakers.get(name)
        if breaker is None:
            return False
        if breaker.closed:
            breaker.note(limits.window, failed=False)
            return False
        if now < breaker.until:
            return False
        breaker.closed, breaker.closed_at = True, now
        breaker.in_a_row = 0
        breaker.recent.clear()
        self._aside.discard(name)
        return True

    def avoided(self, name: str, now: float) -> bool:
        """Whether it must get no request now: it is open, or somebody tries it already."""
        if name not in self._aside:
            return False
        breaker = self._breakers[name]
        return now < breaker.until or breaker.trying

    def try_again(self, name: str) -> bool:
        """Begin to try it, until `tried`; return whether it is one that must be tried."""
        if name in self._aside:
            self._breakers[name].trying = True
            return True
        return False

    def tried(self, name: str) -> None:
        """Let others try it, whatever came of this one."""
        if (breaker := self._breakers.get(name)) is not None:
            breaker.trying = False

    def keep(self, known: Callable[[str], bool]) -> None:
        """Forget those that are not known any more."""
        for name in [name for name in self._breakers if not known(name)]:
            del self._breakers[name]
            self._aside.discard(name)

    def __len__(self) -> int:
        """Return how many are set aside."""
        return len(self._aside)

    def aside(self, now: float) -> Iterator[Aside]:
        """Yield everybody who is set aside, by name."""
        for name in sorted(self._aside):
            breaker = self._breakers[name]
            yield Aside(name, breaker.why, max(0.0, breaker.until - now))

    def _open(self, name: str, breaker: _Breaker, why: str, limits: Ejection, now: float) -> None:
        again = not breaker.closed or now < breaker.closed_at + limits.aside_max_s
        breaker.opened = breaker.opened + 1 if again else 1
        breaker.until = now + min(limits.aside_s * 2 ** min(breaker.opened - 1, 60), limits.aside_max_s)
        breaker.closed, breaker.why, breaker.trying = False, why, False
        self._aside.add(name)
