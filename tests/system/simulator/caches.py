"""The oracle of prefix caches: what the engines of a run have in theirs, beside what routers expect and engines reuse.

It knows the caches from inside: each engine notes every change in a `CacheLife`. A router may lag behind by `LAG_S`,
and by any time where a fault delays or spoils what it hears; a cache that nothing happens to must be known exactly.
What a request finds in a cache is compared with the prompts before it, token by token, and no hash is used for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio
from attrs import define, field, frozen

from actors.engines.simulated.cache_events import CacheEvents
from actors.engines.simulated.held_request import HeldRequest
from actors.routing.candidates import Candidates, Choice
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy
from protocol.block_hashes import block_hash, block_hashes
from protocol.messages.generation import Generate
from tests.rig.vision import IMAGE, VIDEO

LAG_S = 0.5  # until a router knows of a change, on a network without delay
DELAYS_MAX = 20  # usual delays of the network, besides


@define(eq=False)
class CacheLife(CacheEvents):
    """The prefix cache of one life of an engine, by the hashes of its blocks."""

    caches: Caches = field(kw_only=True)
    began_at: float = field(factory=trio.current_time, kw_only=True)
    there: set[int] = field(factory=set, kw_only=True)
    gone: dict[int, float] = field(factory=dict, kw_only=True)  # since when
    held: list[HeldRequest] = field(factory=list, kw_only=True)  # every request that was admitted

    def stored(self, digest: bytes, before: bytes | None) -> None:
        super().stored(digest, before)
        number = block_hash(digest)
        self.there.add(number)
        self.gone.pop(number, None)
        self.caches.ever.add(number)

    def removed(self, digest: bytes) -> None:
        super().removed(digest)
        self._go(block_hash(digest))

    def cleared(self) -> None:
        super().cleared()
        for number in tuple(self.there):
            self._go(number)

    def had(self, number: int, since: float) -> bool:
        """Whether a block is there, or was at that time or later."""
        return number in self.there or self.gone.get(number, -1.0) >= since

    def _go(self, number: int) -> None:
        self.there.discard(number)
        self.gone[number] = trio.current_time()


@define(eq=False)
class Caches:
    """The prefix caches of all engines of a run; implements `tests.rig.fake_engine.CacheWatch`."""

    lag_s: float = LAG_S
    late: Callable[[], bool] = lambda: False  # whether a router may have heard of a change any time later, or wrongly
    ever: set[int] = field(factory=set)  # every block that was in a cache
    computing: set[int] = field(factory=set)  # every block that was expected since a prompt before it has it, too
    lives: list[CacheLife] = field(factory=list)
    expected: int = 0  # choices by what a cache was expected to have
    reused: int = 0  # requests that found a part of their prompt
    evicted: int = 0  # requests that found less than their router expected, since it had gone or never came

    def begin(self) -> CacheEvents:
        life = CacheLife(caches=self)
        self.lives.append(life)
        return life

    def admitted(self, events: CacheEvents, held: HeldRequest) -> None:
        """Check what a request has found in a cache: nothing of another tenant's, and what was expected or is gone."""
        assert isinstance(events, CacheLife)
        request, found = held.request, held.cached
        assert found < len(request.tokens), "nothing is left of a prompt to compute"
        if found and not held.given:  # else what it found before it was put back, which was checked then
            self.reused += 1
            same = max((_common(held, other) for other in events.held if _share(held, other)), default=0)
            assert found <= same, f"{found} tokens were found in the cache, and {same} had been computed"
        if found < request.cached_tokens:
            self._check_missing(events, held)
        events.held.append(held)

    def _check_missing(self, life: CacheLife, held: HeldRequest) -> None:
        """Check why less was found than was expected: the first missing block has gone, or was not computed after all."""
        self.evicted += 1
        assert held.digests is not None
        assert held.lease is not None
        place = len(held.lease.shared)
        assert place < len(held.digests), "more was expected than a prompt has"
        number = block_hash(held.digests[place])
        assert number not in life.there, "a block that is there was not found"
        known = number in self.ever or number in self.computing
        assert known or self.late(), "a block was expected that never was"

    def check_choice(self, request: Generate, expected: int, computing: int, page_size: int, life: CacheLife) -> None:
        """Check that what a router expects in a cache is there, or was a moment ago.

        The first `computing` blocks are those of a prompt before it at the same worker.
        """
        assert expected < len(request.tokens), "no token of a prompt is left to compute"
        assert not (request.media and {IMAGE, VIDEO} & {*request.tokens[:expected]}), "a picture is expected in a cache"
        since = trio.current_time() - self.lag_s
        hashes = block_hashes(request.tokens[:expected], page_size, request.cache_salt)
        self.computing.update(hashes[:computing])
        for number in hashes[computing:]:
            if self.late() or life.began_at >= since:
                continue
            assert life.had(number, since), "a block is expected that is not there"

    def check_index(self, index: PrefixIndex, lives: Iterable[tuple[str, CacheLife]]) -> None:
        """Check that an index knows exactly what is in every cache, unless it is too small for that."""
        known = dict(lives)
        whole = not index.statistics().dropped
        for number in sorted(self.ever):
            match = index.match([number])
            for name, life in known.items():
                has, there = match.blocks(name) == 1, number in life.there
                assert there or not has, f"the index has a block of {name} that is not there"
                assert has or not there or not whole, f"the index lacks a block of {name}"
            assert all(name in known for name, _ in match.longest(64)), "a worker that has gone matches"


def _share(one: HeldRequest, other: HeldRequest) -> bool:
    return one.request.cache_salt == other.request.cache_salt


def _common(one: HeldRequest, other: HeldRequest) -> int:
    """Return how many first tokens of a prompt another request has computed, its answer included."""
    before = len(other.prompt) - 1 if other.given else 0  # it was put back, and is computed again
    computed = [*other.prompt[: max(other.computed, before)], *other.answered]
    count = 0
    for mine, others in zip(one.prompt, computed, strict=False):
        if mine != others:
            break
        count += 1
    return count


LifeOf = Callable[[str], tuple[CacheLife, int] | None]
"""Returns the cache of a worker that is up, and its page size."""


@frozen
class CheckedPolicy:
    """A policy of which each expectation is compared with the cache itself."""

    policy: KvPolicy
    caches: Caches
    life_of: LifeOf

    def __call__(self, request: Generate, candidates: Candidates, /) -> Choice | None:
        choice = self.policy(request, candidates)
        if choice is not None and choice.overlap and (found := self.life_of(choice.load.name)) is not None:
            life, page_size = found
            self.caches.expected += 1
            computing = self._computing(request, choice.load.name, page_size)
            self.caches.check_choice(request, choice.overlap, computing, page_size, life)
        return choice

    def _computing(self, request: Generate, worker: str, page_size: int) -> int:
        """Return how many first blocks of a prompt its worker is computing for another one."""
        hashes = block_hashes(request.tokens, page_size, request.cache_salt)
        return self.policy.expected.blocks(hashes).get(worker, 0)
