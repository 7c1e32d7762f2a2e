"""The walk over a compiled grammar: some hundred tokens, chosen to be expensive, under a budget of processor time.

A grammar that compiles at once may still take seconds for a token, depending on the tokens before it. So the walk
repeats one token, searches for the most expensive next one, goes deep by long tokens, and also chooses at random. It
cannot try every answer: a budget in the scheduler (`plugin/`) ends the requests of grammars that it has missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeAlias

from attrs import define, frozen

STEPS = 512  # steps of one walk
RESTARTS = 8  # restarts of one walk, each when the grammar allows no further token
PROJECTED_TOKENS = 512  # the length of an answer to which a growing cost is extrapolated
CANDIDATES = 4  # next tokens that are tried, to find the most expensive
EXCESS_STEPS = 3.0  # steps' worth of time by which the steps of one answer may exceed their limit in total


class SortedTokenIds(Protocol):
    """Token ids in ascending order, each once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...

    def __contains__(self, token: object, /) -> bool: ...


class MatcherState(Protocol):
    """The state of a grammar's matcher after some tokens."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""

    def accept(self, token: int) -> None:
        """Append one token."""

    def fill(self) -> None:
        """Compute the mask of tokens that may be next."""

    def ids(self) -> SortedTokenIds:
        """Return the tokens of the last mask that do not end the answer; none if only its end may follow."""

    def fork(self) -> Self:
        """Return a copy."""


class SeededRandom(Protocol):
    """A seeded random number generator."""

    def randrange(self, below: int, /) -> int:
        """Return a number from 0 to `below`, exclusive."""


@define
class StepBudget:
    """The time by which the steps of one answer exceed `step_s`, in sum: one slow step is noise, many are a stall."""

    step_s: float
    _excess_s: float = 0.0

    def spend(self, cost_s: float) -> bool:
        """Count a step, and return whether the budget allows it."""
        self._excess_s += max(0.0, cost_s - self.step_s)
        return self._excess_s <= EXCESS_STEPS * self.step_s


@frozen
class WalkResult:
    """The result of a walk: tokens tried, the longest step in seconds, whether the budget was kept."""

    steps: int
    longest_s: float
    kept: bool


Choose: TypeAlias = Callable[["Walk", MatcherState, SortedTokenIds, int | None], int]


@define(eq=False)
class Walk:
    """Several walks from the same start, for `within_s` in total, or until the budget is exceeded."""

    start: MatcherState
    clock: Callable[[], float]
    rng: SeededRandom
    token_bytes: Callable[[int], int]  # the length of a token
    step_s: float
    within_s: float
    steps: int = 0
    longest_s: float = 0.0

    def run(self) -> WalkResult:
        """Walk with each strategy."""
        kept = all(self._walk(choose, share * self.within_s) for choose, share in STRATEGIES)
        return WalkResult(self.steps, self.longest_s, kept)

    def _walk(self, choose: Choose, within_s: float) -> bool:
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
            if not budget.spend(costs[-1]) or self.longest_s > (1 + EXCESS_STEPS) * self.step_s:
                return False
            self.steps += 1
        return projected_step_s(costs, PROJECTED_TOKENS) <= (1 + EXCESS_STEPS) * self.step_s

    def step(self, state: MatcherState, token: int) -> float:
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


def projected_step_s(costs: Sequence[float], tokens: int) -> float:
    """Return the cost of a step after `tokens` tokens, if costs keep growing as they have; 0 for too few steps."""
    quarter = len(costs) // 4
    if quarter < 8:
        return 0.0
    # Medians, since single steps are slow on a machine that does other things.
    early, late = (sorted(costs[start : start + quarter])[quarter // 2] for start in (quarter, len(costs) - quarter))
    return late + max(0.0, late - early) / (len(costs) - 2 * quarter) * max(0, tokens - len(costs))


def _has(ids: SortedTokenIds, token: int | None) -> bool:
    return token is not None and token in ids


def _random(walk: Walk, _: MatcherState, ids: SortedTokenIds, __: int | None) -> int:
    return int(ids[walk.rng.randrange(len(ids))])


def _most_expensive(walk: Walk, state: MatcherState, ids: SortedTokenIds, last: int | None) -> int:
    tried = {_random(walk, state, ids, last) for _ in range(CANDIDATES)} | ({last} if _has(ids, last) else set())
    costs = {token: walk.step(state.fork(), token) for token in sorted(token for token in tried if token is not None)}
    return max(costs, key=costs.__getitem__)


def _repeated(walk: Walk, state: MatcherState, ids: SortedTokenIds, last: int | None) -> int:
    if last is not None and _has(ids, last):
        return last
    return _most_expensive(walk, state, ids, None)


def _longest(walk: Walk, state: MatcherState, ids: SortedTokenIds, last: int | None) -> int:
    return max((_random(walk, state, ids, last) for _ in range(2 * CANDIDATES)), key=walk.token_bytes)


def _shortest(walk: Walk, state: MatcherState, ids: SortedTokenIds, last: int | None) -> int:
    return min((_random(walk, state, ids, last) for _ in range(2 * CANDIDATES)), key=walk.token_bytes)


# How tokens are chosen, and the share of the time of each.
STRATEGIES: tuple[tuple[Choose, float], ...] = (
    (_repeated, 0.4),
    (_most_expensive, 0.2),
    (_longest, 0.2),
    (_shortest, 0.1),
    (_random, 0.1),
)
