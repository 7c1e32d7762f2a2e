"""Outlier ejection: a worker that keeps failing is ejected for a while, then probed by one request at a time.

Each worker has a circuit breaker. *Closed*: requests flow. *Open*: none does until its time is over, which is twice as
long each time. *Half-open*: one request at a time probes the worker, and its success closes the breaker.

After a failed hand-off either worker may be at fault, or the network between them. So a pair has a breaker of its own,
and its failures count for both workers as well: a worker that fails with several others is ejected itself, and the
others' failures with it are forgotten.

Pure: time comes in as a parameter, and there is no randomness in it. Its callers decide what counts as a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from math import inf

from attrs import define, field, frozen


@frozen
class Ejection:
    """The limits of ejection: failures, durations, and the largest share of a pool at a time."""

    failures_max: int = 5  # failures in a row
    window: int = 20  # answers in the rate of failures
    rate_max: float = 0.5  # the most failures among these answers
    ejected_s: float = 10.0  # the first time; then twice as long each time
    ejected_max_s: float = 300.0
    share_max: float = 0.5  # the most of one leg's workers, never a lone one


@frozen
class OngoingEjection:
    """An ejected worker or pair: why, and for how many seconds more; 0 while it is probed."""

    name: str
    why: str
    for_s: float


@frozen
class Suspect:
    """A worker or a pair that may be to blame for a failure: its kind, and the number of its kind in the pool."""

    name: str
    kind: str
    peers: int


ALONE = ""
"""Instead of a partner's name: the failure of a worker by itself."""


@define(eq=False)
class _Breaker:
    kind: str
    recent: deque[str | None] = field(factory=deque)  # the last answers: the partner of a failure, or None
    opened: int = 0  # openings in a row
    until: float = -inf  # the end of being open; from then on half-open
    closed: bool = True
    closed_at: float = -inf
    why: str = ""
    probed_by: object | None = None

    def note(self, limits: Ejection, failed_with: str | None) -> None:
        self.recent.append(failed_with)
        while len(self.recent) > max(limits.window, limits.failures_max):
            self.recent.popleft()

    def blamed(self, limits: Ejection) -> set[str]:
        """Return the partners of its failures, if these are enough to open it; else none."""
        answers = list(takewhile(lambda partner: partner is not None, reversed(self.recent)))
        if len(answers) < limits.failures_max:
            answers = list(self.recent)[-limits.window :]
            failures = len(answers) - answers.count(None)
            if len(answers) < limits.window or failures <= limits.rate_max * len(answers):
                return set()
        return {partner for partner in answers if partner is not None}


@define(eq=False)
class OutlierDetector:
    """The circuit breakers of the workers and pairs of one pool."""

    _breakers: dict[str, _Breaker] = field(factory=dict)
    _open_names: set[str] = field(factory=set)  # the names with an open or half-open breaker
    _avoided_until: dict[str, float] = field(factory=dict)  # the names that others are preferred to for a while

    def avoid(self, name: str, until: float, now: float) -> None:
        """Avoid a worker or pair for a short time, whether or not it is ejected."""
        self._forget_avoided(now)
        self._avoided_until[name] = until

    def _forget_avoided(self, now: float) -> None:
        self._avoided_until = {name: until for name, until in self._avoided_until.items() if until > now}

    def failed(self, suspect: Suspect, why: str, limits: Ejection, now: float) -> bool:
        """Count a failure of one worker; return whether it is ejected by this."""
        if not (breaker := self._breaker(suspect)).closed:
            return self._reopen(suspect.name, why, limits, now)
        breaker.note(limits, ALONE)
        return bool(breaker.blamed(limits)) and self._eject(suspect, why, limits, now)

    def failed_pair(self, pair: Suspect, both: Sequence[Suspect], why: str, limits: Ejection, now: float) -> str | None:
        """Count a failure of a pair, with either of the two at fault; return the name ejected by it, if any.

        A half-open one is ejected first; else the worker that fails with the most others; else the pair.
        """
        if opened := [suspect.name for suspect in (*both, pair) if suspect.name in self._open_names]:
            return next((name for name in opened if self._reopen(name, why, limits, now)), None)
        first, second = both
        for suspect, other in ((first, second.name), (second, first.name), (pair, ALONE)):
            self._breaker(suspect).note(limits, other)
        by_partners = [(len(self._breakers[suspect.name].blamed(limits)), suspect) for suspect in both]
        for partners, suspect in sorted(by_partners, key=lambda entry: -entry[0]):
            if partners > 1 and self._eject(suspect, why, limits, now):
                self._forget_failures_with(suspect.name)
                return suspect.name
        failing = self._breakers[pair.name].blamed(limits)
        return pair.name if failing and self._eject(pair, why, limits, now) else None

    def answered(self, name: str, limits: Ejection, now: float) -> bool:
        """Count a success; return whether it closes a breaker that was half-open."""
        if self._avoided_until:
            self._avoided_until.pop(name, None)
            self._forget_avoided(now)
        breaker = self._breakers.get(name)
        if breaker is None:
            return False
        if breaker.closed:
            breaker.note(limits, None)
            return False
        if now < breaker.until:
            return False
        breaker.closed, breaker.closed_at, breaker.probed_by = True, now, None
        breaker.recent.clear()
        self._open_names.discard(name)
        return True

    def avoided(self, name: str, now: float) -> bool:
        """Whether a worker or pair must get no request now: it is open, already being probed, or has just failed."""
        if now < self._avoided_until.get(name, -inf):
            return True
        if name not in self._open_names:
            return False
        breaker = self._breakers[name]
        return now < breaker.until or breaker.probed_by is not None

    def next_probe_at(self, now: float) -> float:
        """Return when the next avoided or open one may be asked; `inf` if there is none."""
        ends = (*self._avoided_until.values(), *(self._breakers[name].until for name in self._open_names))
        return min((until for until in ends if until > now), default=inf)

    def begin_probe(self, name: str, by: object) -> bool:
        """Begin to probe it, until `end_probe`, unless `by` another already; return whether it is ejected at all."""
        if name not in self._open_names:
            return False
        if (breaker := self._breakers[name]).probed_by is None:
            breaker.probed_by = by
        return True

    def end_probe(self, name: str, by: object) -> None:
        """End a probe, after any outcome; no effect on a probe by another."""
        if (breaker := self._breakers.get(name)) is not None and breaker.probed_by is by:
            breaker.probed_by = None

    def retain(self, exists: Callable[[str], bool]) -> None:
        """Forget the breakers of removed workers and pairs."""
        for name in [name for name in self._breakers if not exists(name)]:
            del self._breakers[name]
            self._open_names.discard(name)
        self._avoided_until = {name: until for name, until in self._avoided_until.items() if exists(name)}

    def __len__(self) -> int:
        """Return the number of ejected and avoided workers and pairs."""
        return len(self._open_names) + len(self._avoided_until)

    def ejected(self, now: float) -> Iterator[OngoingEjection]:
        """Yield the ejected workers and pairs, by name."""
        for name in sorted(self._open_names):
            breaker = self._breakers[name]
            yield OngoingEjection(name, breaker.why, max(0.0, breaker.until - now))

    def _breaker(self, suspect: Suspect) -> _Breaker:
        return self._breakers.setdefault(suspect.name, _Breaker(suspect.kind))

    def _reopen(self, name: str, why: str, limits: Ejection, now: float) -> bool:
        if now < self._breakers[name].until:  # it was asked before it was ejected
            return False
        self._open(name, why, limits, now)
        return True

    def _eject(self, suspect: Suspect, why: str, limits: Ejection, now: float) -> bool:
        others_open = sum(1 for name in self._open_names if self._breakers[name].kind == suspect.kind)
        if others_open + 1 > limits.share_max * suspect.peers:
            return False
        self._open(suspect.name, why, limits, now)
        return True

    def _forget_failures_with(self, culprit: str) -> None:
        """Forget the failures that others, and its pairs, had with a culprit."""
        for name in [name for name in self._breakers if culprit in name.split("+") and name != culprit]:
            del self._breakers[name]
            self._open_names.discard(name)
        for breaker in self._breakers.values():
            breaker.recent = deque(partner for partner in breaker.recent if partner != culprit)

    def _open(self, name: str, why: str, limits: Ejection, now: float) -> None:
        breaker = self._breakers[name]
        again = not breaker.closed or now < breaker.closed_at + limits.ejected_max_s
        breaker.opened = breaker.opened + 1 if again else 1
        breaker.until = now + min(limits.ejected_s * 2 ** min(breaker.opened - 1, 60), limits.ejected_max_s)
        breaker.closed, breaker.why = False, why
        self._open_names.add(name)
