"""Admission by KV memory: a rank is given a request only when it has memory for the largest need of the request.

An engine given more would put the request into a queue of its own, first come, first served, or take memory from
running answers. Held back outside, a request waits in an inbox, where others can overtake it. The need is an estimate:
a prefix that several requests share in the cache counts for none of them.

Once requests of two owners have been seen, one owner leaves a part of the memory to the others: its next request waits
for memory of its own, and requests of others pass. Only its sole request may need more.

Where the memory is no limit, a full engine has requests of one owner give way to the first ones of others (the engine
port): what the memory really holds, and what an answer will come to need, the engine alone can find out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from attrs import define, evolve, field

from actors.kit.pending_prefill import PendingPrefill
from actors.kit.shares import LARGE_PART, BudgetLimits, Obstacle
from protocol.cost import kv_tokens
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate

BEHIND = -1
"""The priority inside an engine of requests that give way there."""

OWNERS_SEEN = 2
"""The owners from which on each one leaves memory to others."""


def kv_tokens_needed(request: Generate, leg: Leg, page_size: int) -> int:
    """Return the tokens of KV memory that a request may come to need (`kv_tokens`), in whole pages."""
    needed = kv_tokens(request, leg, request.cached_tokens)
    return -(-needed // page_size) * page_size


@define(eq=False)
class KvAdmission:
    """The KV memory of one rank, as far as its requests may come to need it; unless it is a limit, everything fits."""

    kv_tokens_max: int = 0  # 0: unknown, and no limit
    leg: Leg = Leg.BOTH
    page_size: int = 1
    is_limit: bool = True
    _owned: Counter[str] = field(factory=Counter)  # tokens, by owner
    _seen: set[str] = field(factory=set)  # owners of requests, two at most
    held: PendingPrefill = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.held = PendingPrefill(self.kv_tokens_max)

    @classmethod
    def of(cls, info: EngineInfo, leg: Leg, *, is_limit: bool = True) -> KvAdmission:
        """Return the memory of one rank of an engine."""
        return cls(info.kv_tokens_max, leg, info.page_size, is_limit)

    @property
    def _limits(self) -> bool:
        return self.is_limit and self.kv_tokens_max > 0

    def fits(self, request: Generate) -> bool:
        """Whether there is memory for a request; a first one is taken, however large."""
        return not self._limits or self.held.fits(self._needed(request))

    def _needed(self, request: Generate) -> int:
        return kv_tokens_needed(request, self.leg, self.page_size)

    def may_begin(self, request: Generate) -> bool:
        """Whether the owner of a request leaves memory enough to others if this request begins."""
        if not self._limits:
            return True
        if len(self._seen) < OWNERS_SEEN:
            self._seen.add(request.owner)
        if len(self._seen) < OWNERS_SEEN or not (owned := self._owned[request.owner]):
            return True
        limits = BudgetLimits(self.kv_tokens_max, int(self.kv_tokens_max * LARGE_PART))
        return limits.obstacle(self._needed(request), owned=owned) is not Obstacle.OWNER

    def is_behind(self, request: Generate) -> bool:
        """Whether a request, not yet taken, gives way in the engine to others, where memory is short.

        Each owner's sole request does not, nor do further ones within the part that one owner leaves to the others.
        """
        return self._is_behind(request, self._owned[request.owner])

    def with_engine_priority(self, request: Generate) -> Generate:
        """Return a request that has been taken, with its priority inside the engine."""
        priority = BEHIND if self._is_behind(request, self._owned[request.owner] - self._needed(request)) else 0
        return request if request.priority == priority else evolve(request, priority=priority)

    def _is_behind(self, request: Generate, owned: int) -> bool:
        return owned > 0 and owned + self._needed(request) > self.kv_tokens_max * (1 - LARGE_PART)

    def take(self, request: Generate, recheck: Callable[[], None]) -> Callable[[], None]:
        """Count the memory of a request; the returned function gives it back, and calls `recheck` if it is a limit."""
        if not self.kv_tokens_max:
            return _ignore
        key, needed = object(), self._needed(request)
        self.held.add(key, needed)
        self._owned[request.owner] += needed

        def give_back() -> None:
            self.held.discard(key)
            self._owned[request.owner] -= needed
            if not self._owned[request.owner]:
                del self._owned[request.owner]
            if self._limits:  # else none waits for it
                recheck()

        return give_back


def _ignore() -> None:
    pass
