"""Outlier ejection: a worker that keeps failing is set aside for a while, then tried by one request at a time.

As a circuit breaker has: *closed*, requests flow; *open*, none does until its time is over, twice as long each time;
*half-open*, one request at a time tries whether it is well again. A pair of workers has a breaker of its own. What a
pair has failed counts for each of its two as well: one that fails with several others is set aside itself, and what
those have failed with it is forgotten.
Pure: time comes in as a parameter, and there is no chance in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
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
    ejected_s: Annotated[float, Within(above=0, at_most=86_400)] = 10.0  # the first time; then twice as long each time
    ejected_max_s: Annotated[float, Within(above=0, at_most=86_400)] = 300.0
    share_max: Annotated[float, Within(at_least=0, at_most=1)] = (
        0.5  # of the workers of one leg; one alone is never set aside
    )


@frozen
class EjectedWorker:
    """A worker, or a pair, that is set aside: why, and for how many seconds more; 0 if it is being tried again."""

    name: str
    why: str
    for_s: float


@frozen
class Suspect:
    """One that may be to blame for a failure: what it is, and how many there are who can do the same job."""

    name: str
    kind: str
    peers: int


ALONE = ""
"""With whom a worker has failed that nobody else had a part in."""


@define(eq=False)
class _Breaker:
    kind: str
    recent: deque[str | None] = field(factory=deque)  # with whom each of the last answers failed, None if it was whole
    opened: int = 0  # so many times in a row
    until: float = -inf  # it is open; from then on half-open
    closed: bool = True
    closed_at: float = -inf
    why: str = ""
    tried_by: object | None = None

    def note(self, limits: Ejection, failed_with: str | None) -> None:
        self.recent.append(failed_with)
        while len(self.recent) > max(limits.window, limits.failures_max):
            self.recent.popleft()

    def blamed(self, limits: Ejection) -> set[str]:
        """Return with whom it failed so often that it is to be opened; nobody if it did not."""
        row = list(takewhile(lambda each: each is not None, reversed(self.recent)))
        if len(row) < limits.failures_max:
            row = list(self.recent)[-limits.window :]
            failures = len(row) - row.count(None)
            if len(row) < limits.window or failures <= limits.rate_max * len(row):
                return set()
        return {each for each in row if each is not None}


@define(eq=False)
class OutlierDetector:
    """Which workers of a pool are set aside."""

    _breakers: dict[str, _Breaker] = field(factory=dict)
    _aside: set[str] = field(factory=set)  # those that are not closed

    def failed(self, suspect: Suspect, why: str, limits: Ejection, now: float) -> bool:
        """Note a failure that one alone is to blame for; return whether that one is set aside now."""
        if not (breaker := self._breaker(suspect)).closed:
            return self._reopen(suspect.name, why, limits, now)
        breaker.note(limits, ALONE)
        return bool(breaker.blamed(limits)) and self._set_aside(suspect, why, limits, now)

    def failed_pair(self, pair: Suspect, both: Sequence[Suspect], why: str, limits: Ejection, now: float) -> str | None:
        """Note a failure of two, of which nobody knows who is at fault; return the name that is set aside now, if any.

        If one of them is set aside, it is that one; else whoever fails with the most others; else the pair.
        """
        if aside := [each.name for each in (*both, pair) if each.name in self._aside]:
            return next((name for name in aside if self._reopen(name, why, limits, now)), None)
        one, two = both
        for suspect, other in ((one, two.name), (two, one.name), (pair, ALONE)):
            self._breaker(suspect).note(limits, other)
        with_many = [(len(self._breakers[each.name].blamed(limits)), each) for each in both]
        for others, each in sorted(with_many, key=lambda many: -many[0]):
            if others > 1 and self._set_aside(each, why, limits, now):
                self._acquit(each.name)
                return each.name
        failing = self._breakers[pair.name].blamed(limits)
        return pair.name if failing and self._set_aside(pair, why, limits, now) else None

    def answered(self, name: str, limits: Ejection, now: float) -> bool:
        """Note an answer that was whole; return whether that ends the time for which its worker was set aside."""
        breaker = self._breakers.get(name)
        if breaker is None:
            return False
        if breaker.closed:
            breaker.note(limits, None)
            return False
        if now < breaker.until:
            return False
        breaker.closed, breaker.closed_at, breaker.tried_by = True, now, None
        breaker.recent.clear()
        self._aside.discard(name)
        return True

    def avoided(self, name: str, now: float) -> bool:
        """Whether it must get no request now: it is open, or somebody tries it already."""
        if name not in self._aside:
            return False
        breaker = self._breakers[name]
        return now < breaker.until or breaker.tried_by is not None

    def begin_probe(self, name: str, by: object) -> bool:
        """Begin to try it, until `tried`, unless somebody does so already; return whether it is one to be tried."""
        if name not in self._aside:
            return False
        if (breaker := self._breakers[name]).tried_by is None:
            breaker.tried_by = by
        return True

    def tried(self, name: str, by: object) -> None:
        """Let others try it, whatever came of this one; nothing changes if it is somebody else who tries it."""
        if (breaker := self._breakers.get(name)) is not None and breaker.tried_by is by:
            breaker.tried_by = None

    def keep(self, known: Callable[[str], bool]) -> None:
        """Forget those that are not known any more."""
        for name in [name for name in self._breakers if not known(name)]:
            del self._breakers[name]
            self._aside.discard(name)

    def __len__(self) -> int:
        """Return how many are set aside."""
        return len(self._aside)

    def aside(self, now: float) -> Iterator[EjectedWorker]:
        """Yield everybody who is set aside, by name."""
        for name in sorted(self._aside):
            breaker = self._breakers[name]
            yield EjectedWorker(name, breaker.why, max(0.0, breaker.until - now))

    def _breaker(self, suspect: Suspect) -> _Breaker:
        return self._breakers.setdefault(suspect.name, _Breaker(suspect.kind))

    def _reopen(self, name: str, why: str, limits: Ejection, now: float) -> bool:
        if now < self._breakers[name].until:  # it was asked before it was set aside
            return False
        self._open(name, why, limits, now)
        return True

    def _set_aside(self, suspect: Suspect, why: str, limits: Ejection, now: float) -> bool:
        others_aside = sum(1 for each in self._aside if self._breakers[each].kind == suspect.kind)
        if others_aside + 1 > limits.share_max * suspect.peers:
            return False
        self._open(suspect.name, why, limits, now)
        return True

    def _acquit(self, culprit: str) -> None:
        """Forget what others, and its pairs, have failed with one who is to blame for it."""
        for name in [name for name in self._breakers if culprit in name.split("+") and name != culprit]:
            del self._breakers[name]
            self._aside.discard(name)
        for breaker in self._breakers.values():
            breaker.recent = deque(each for each in breaker.recent if each != culprit)

    def _open(self, name: str, why: str, limits: Ejection, now: float) -> None:
        breaker = self._breakers[name]
        again = not breaker.closed or now < breaker.closed_at + limits.ejected_max_s
        breaker.opened = breaker.opened + 1 if again else 1
        breaker.until = now + min(limits.ejected_s * 2 ** min(breaker.opened - 1, 60), limits.ejected_max_s)
        breaker.closed, breaker.why = False, why
        self._aside.add(name)
