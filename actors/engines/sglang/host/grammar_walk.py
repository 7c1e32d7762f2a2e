"""The walk over a compiled grammar: some hundred tokens, chosen to be dear, each under a budget of processor time.

A grammar that compiles at once may still take seconds a token, and how long may depend on the tokens. So the walk
repeats one token, looks for the dearest next one, goes deep by long tokens, and strays at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeAlias

from attrs import define, frozen

STEPS = 512  # of one walk
RESTARTS = 8  # of one walk, at the end of what the grammar allows
GROWN = 512  # tokens, up to which a cost that grows with each is followed
TRIED = 4  # next tokens, to find the dearest
EXCESS = 3.0  # steps' worth of time by which the steps of one answer may exceed their limit, all together


class Ids(Protocol):
    """Token ids in order, none twice."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> int: ...

    def __contains__(self, token: object, /) -> bool: ...


class State(Protocol):
    """A grammar as it is after some tokens."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""

    def accept(self, token: int) -> None:
        """Take one more token."""

    def fill(self) -> None:
        """Compute the mask of tokens that may be next."""

    def ids(self) -> Ids:
        """Return those of the last mask that do not end the answer; none if only its end may follow."""

    def fork(self) -> Self:
        """Return another one that is as this one is."""


class Chance(Protocol):
    """Chance, seeded."""

    def randrange(self, below: int, /) -> int:
        """Return a number from 0 to `below`, exclusive."""


@define
class StepBudget:
    """Sums up by how much the steps of one answer exceed `step_s`: a single slow step is noise, many are a stall."""

    step_s: float
    _excess_s: float = 0.0

    def spend(self, cost_s: float) -> bool:
        """Count a step, and return whether the budget allows it."""
        self._excess_s += max(0.0, cost_s - self.step_s)
        return self._excess_s <= EXCESS * self.step_s


@frozen
class Walked:
    """What a walk saw: tokens tried, the longest step in seconds, whether the budget was kept."""

    steps: int
    longest_s: float
    kept: bool


Choose: TypeAlias = Callable[["Walk", State, Ids, int | None], int]


@define(eq=False)
class Walk:
    """One walk after another from the same start, for `within_s` all together, or until the budget is broken."""

    start: State
    clock: Callable[[], float]
    chance: Chance
    length_of: Callable[[int], int]  # of a token, in bytes
    step_s: float
    within_s: float
    steps: int = 0
    longest_s: float = 0.0

    def run(self) -> Walked:
        """Walk in every way."""
        kept = all(self._one(choose, share * self.within_s) for choose, share in WAYS)
        return Walked(self.steps, self.longest_s, kept)

    def _one(self, choose: Choose, within_s: float) -> bool:
        budget, state, last = StepBudget(self.step_s), self.start.fork(), None
        until, restarts, costs = self.clock() + within_s, 0, list[float]()
        if not budget.spend(self._timed(state.fill)):
            return False
        for _ in range(STEPS):
            if self.clock() >= until or restarts > RESTARTS:
                break
            ids = () if state.ended else state.ids()
            if not len(ids):
                state, last, restarts, costs = self.start.fork(), None, restarts + 1, []
                state.fill()
                continue
            last = choose(self, state, ids, last)
            costs.append(self.step(state, last))
            if not budget.spend(costs[-1]) or self.longest_s > (1 + EXCESS) * self.step_s:
                return False
            self.steps += 1
        return grown(costs, GROWN) <= (1 + EXCESS) * self.step_s

    def step(self, state: State, token: int) -> float:
        """Take one token and compute the next mask; return the processor time of both, in seconds."""

        def both() -> None:
            state.accept(token)
            if not state.ended:
                state.fill()

        return self._timed(both)

    def _timed(self, work: Callable[[], None]) -> float:
        began_at = self.clock()
        work()
        cost_s = self.clock() - began_at
        self.longest_s = max(self.longest_s, cost_s)
        return cost_s


def grown(costs: Sequence[float], tokens: int) -> float:
    """Return what a step will cost after so many tokens, if costs go on as they have; 0 for too few to tell."""
    quarter = len(costs) // 4
    if quarter < 8:
        return 0.0
    # Medians, since a machine that does other things makes single steps slow.
    early, late = (sorted(costs[at : at + quarter])[quarter // 2] for at in (quarter, len(costs) - quarter))
    return late + max(0.0, late - early) / (len(costs) - 2 * quarter) * max(0, tokens - len(costs))


def _has(ids: Ids, token: int | None) -> bool:
    return token is not None and token in ids


def _random(walk: Walk, _: State, ids: Ids, __: int | None) -> int:
    return int(ids[walk.chance.randrange(len(ids))])


def _dearest(walk: Walk, state: State, ids: Ids, last: int | None) -> int:
    tried = {_random(walk, state, ids, last) for _ in range(TRIED)} | ({last} if _has(ids, last) else set())
    costs = {token: walk.step(state.fork(), token) for token in sorted(each for each in tried if each is not None)}
    return max(costs, key=costs.__getitem__)


def _repeated(walk: Walk, state: State, ids: Ids, last: int | None) -> int:
    if last is not None and _has(ids, last):
        return last
    return _dearest(walk, state, ids, None)


def _longest(walk: Walk, state: State, ids: Ids, last: int | None) -> int:
    return max((_random(walk, state, ids, last) for _ in range(2 * TRIED)), key=walk.length_of)


def _shortest(walk: Walk, state: State, ids: Ids, last: int | None) -> int:
    return min((_random(walk, state, ids, last) for _ in range(2 * TRIED)), key=walk.length_of)


# How tokens are chosen, and the share of the time.
WAYS: tuple[tuple[Choose, float], ...] = (
    (_repeated, 0.4),
    (_dearest, 0.2),
    (_longest, 0.2),
    (_shortest, 0.1),
    (_random, 0.1),
)
