"""Admission by KV memory: a rank is given a request only when it has memory for all that the request may come to need.

An engine that is given more than it has memory for holds the request in a queue of its own, behind which nothing can be
overtaken, or takes memory from answers that have begun. Held back outside, a request waits in an inbox, from which it
can move, and where it holds up nobody for memory that requests of its own owner have. What a request needs is an
estimate: a prefix that several requests share in the cache counts for none of them.

An engine that *admits all* decides itself, as its own scheduler does, which knows what is in its memory. It gets every
request but one: that which would wait there for requests of its own owner, while there are other owners behind it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

import trio
from attrs import define, field

from protocol.cluster import Leg
from protocol.messages import EngineInfo, Generate

ANSWER_TOKENS_MAX = 4096
"""The most tokens of an answer that count, as in SGLang's own estimate: longer answers mostly end long before."""

SHARED_S = 60.0  # after its last request, for which an owner is thought to come again


def kv_tokens_needed(request: Generate, leg: Leg, page_size: int) -> int:
    """Return the tokens of KV memory that a request may come to need, in whole pages.

    They are those of its prompt that are not expected in the cache, and, but for a prefill, those of its answer.
    """
    prompt = len(request.tokens)
    needed = prompt - min(max(0, request.cached_tokens), prompt)  # which another node may have made anything
    if leg is not Leg.PREFILL:
        needed += max(0, min(request.sampling.tokens_max, ANSWER_TOKENS_MAX))  # another node may have made it negative
    return -(-needed // page_size) * page_size


@define(eq=False)
class HeldTokens:
    """Tokens of KV memory, in all and by the owner of the requests that have them."""

    tokens: int = 0
    _by_owner: Counter[str] = field(factory=Counter)

    def add(self, owner: str, tokens: int) -> None:
        """Add what a request of an owner has, or subtract it."""
        self.tokens += tokens
        self._by_owner[owner] += tokens
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def fits(self, needed: int, tokens_max: int, more: int = 0) -> bool:
        """Whether there is room for so many beside these and `more`; for a first request there is, however large."""
        held = self.tokens + more
        return not held or held + needed <= tokens_max

    def waits_for_own(self, owner: str, needed: int, tokens_max: int, more: int = 0) -> bool:
        """Whether there would be room for so many without what the same owner has; never if it is nobody."""
        own = self._by_owner.get(owner, 0)
        if not owner or not own or self.fits(needed, tokens_max, more):
            return False
        others = self.tokens + more - own
        return not others or others + needed <= tokens_max


@define(eq=False)
class KvAdmission:
    """The KV memory of one rank, as far as its requests may come to need it; without a limit everything fits."""

    kv_tokens_max: int = 0  # 0: no limit
    leg: Leg = Leg.BOTH
    page_size: int = 1
    admits_all: bool = False  # but what waits for its own while others are there
    held: HeldTokens = field(init=False, factory=HeldTokens)
    _any_waits: bool = field(init=False, default=False)  # for memory, as far as is known
    _taken_at: OrderedDict[str, float] = field(init=False, factory=OrderedDict)  # of the last two owners

    @classmethod
    def of(cls, info: EngineInfo, leg: Leg, *, admits_all: bool = False) -> KvAdmission:
        """Return the memory of one rank of an engine."""
        return cls(info.kv_tokens_max, leg, info.page_size, admits_all)

    def fits(self, request: Generate) -> bool:
        """Whether a request may be given to the engine; a first one may, however large."""
        if not self.kv_tokens_max:
            return True
        if self.admits_all:
            fits = not self._is_shared(request.owner) or not self.waits_for_own(request)
        else:
            fits = self.held.fits(self._needed(request), self.kv_tokens_max)
        self._any_waits = self._any_waits or not fits
        return fits

    def waits_for_own(self, request: Generate) -> bool:
        """Whether only what requests of the same owner have keeps a request from having memory."""
        if not self.kv_tokens_max:
            return False
        return self.held.waits_for_own(request.owner, self._needed(request), self.kv_tokens_max)

    def take(self, request: Generate, recheck: Callable[[], None]) -> Callable[[], None]:
        """Count a request as one that has memory; return what ends that, and has what waits be looked at again."""
        if not self.kv_tokens_max:
            return _ignore
        owner, needed = request.owner, self._needed(request)
        self.held.add(owner, needed)
        self._taken_at[owner] = trio.current_time()
        self._taken_at.move_to_end(owner)
        if len(self._taken_at) > 2:
            self._taken_at.popitem(last=False)

        def give_back() -> None:
            self.held.add(owner, -needed)
            if self._any_waits:  # else nobody has to be woken
                self._any_waits = False
                recheck()

        return give_back

    def _needed(self, request: Generate) -> int:
        return kv_tokens_needed(request, self.leg, self.page_size)

    def _is_shared(self, owner: str) -> bool:
        """Whether a request of another owner has been taken not long ago."""
        since = trio.current_time() - SHARED_S
        return any(at >= since for other, at in self._taken_at.items() if other != owner)


def _ignore() -> None:
    pass
