"""What is lost of the prefixes that requests count on, beside an oracle that knows what is in every cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile

from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.routing.candidates import TakenChoice
from actors.routing.counted_blocks import LOOKS_MAX
from actors.routing.kv import KvPolicy, KvSettings
from actors.routing.load import Load
from actors.routing.prefix_index import PrefixIndex
from protocol.block_hashes import block_hashes_after
from protocol.kv_events import BlockChange, BlockEvent
from protocol.messages import Generate, PromptBlocks, RoutingHints
from tests.rig.router import Loads, generate

PAGE = 16
WORKERS = ("a", "b")


@define(eq=False)
class Following:
    """A request on its way, and the least that its worker was to have of its prompt since it was chosen, in tokens."""

    worker: str
    hashes: Sequence[int]
    taken: TakenChoice
    overlap: int
    least: int


@define(eq=False)
class Caches:
    """The caches of two workers, and a policy that hears of them with gaps."""

    rng: random.Random
    policy: KvPolicy = field(init=False)
    prompts: list[Generate] = field(init=False)
    blocks: dict[str, set[int]] = field(factory=lambda: {worker: set() for worker in WORKERS})
    following: list[Following] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.policy = KvPolicy(KvSettings(), PrefixIndex(), self.rng.random, lambda: 0.0)
        self.prompts = [self._prompt() for _ in range(8)]
        for worker in WORKERS:
            self.policy.index.add_holders(worker, 1)

    def _prompt(self) -> Generate:
        """Return one of few prompts, which branch."""
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 9))]
        prompt = [*(token for token in tokens for _ in range(PAGE)), 7]
        blocks = PromptBlocks(PAGE, *block_hashes_after(b"", prompt, PAGE))
        return evolve(generate(prompt=prompt), hints=RoutingHints("", (blocks,)))

    def step(self) -> None:
        """Let something happen, and check what is expected after it."""
        worker, drawn = self.rng.choice(WORKERS), self.rng.random()
        is_known = worker not in self.policy.index.unknown
        if drawn < 0.35 and is_known and len(self.following) < LOOKS_MAX:
            self._take(worker)
        elif drawn < 0.65 and is_known:
            self._tell(worker)
        elif drawn < 0.7:
            (self._begin_gap if is_known else self._end_gap)(worker)
        elif self.following:
            self._leave(self.rng.choice(self.following))
        self._check()

    def _take(self, worker: str) -> None:
        request = self.rng.choice(self.prompts)
        choice = self.policy(request, Loads([Load(worker, 0, 8)]))
        assert choice is not None
        assert choice.on_taken is not None
        if (taken := choice.on_taken()) is not None:
            self.following.append(Following(worker, _hashes(request), taken, choice.overlap, choice.overlap))

    def _tell(self, worker: str) -> None:
        """Let a worker compute and evict prompts, and tell of it in one message."""
        events = list[BlockEvent]()
        for _ in range(self.rng.randrange(1, 4)):
            hashes = _hashes(self.rng.choice(self.prompts))
            if self.rng.random() < 0.5:
                self.blocks[worker].update(hashes)
                events.append(BlockEvent(BlockChange.STORED, 0, hashes))
            elif self.rng.random() < 0.1:
                self.blocks[worker].clear()
                events.append(BlockEvent(BlockChange.CLEARED))
            else:
                events.append(BlockEvent(BlockChange.REMOVED, 0, self._evicted(worker, hashes)))
        self.policy.index.apply(worker, events)
        self.policy.index.add_holders(worker, 1)

    def _evicted(self, worker: str, hashes: Sequence[int]) -> tuple[int, ...]:
        """Evict a block of a prompt and all behind it, in any order."""
        first = self.rng.choice(hashes)
        behind = {
            number for each in map(_hashes, self.prompts) if first in each for number in each[each.index(first) :]
        }
        gone = sorted(behind & self.blocks[worker])
        self.rng.shuffle(gone)
        self.blocks[worker].difference_update(gone)
        return tuple(gone)

    def _begin_gap(self, worker: str) -> None:
        """Lose what a worker tells; it evicts something meanwhile."""
        self.policy.index.forget(worker)
        self.policy.index.unknown.add(worker)
        self._evicted(worker, _hashes(self.rng.choice(self.prompts)))

    def _end_gap(self, worker: str) -> None:
        index = self.policy.index
        for hashes in map(_hashes, self.prompts):
            has = tuple(number for number in hashes if number in self.blocks[worker])
            index.apply(worker, [BlockEvent(BlockChange.STORED, 0, has)])
        index.add_holders(worker, 1)
        index.unknown.discard(worker)
        index.tell_known(worker)

    def _leave(self, one: Following) -> None:
        """Let a request begin, if its worker can tell of it, or leave before."""
        self.following.remove(one)
        if self.rng.random() < 0.6 and one.worker not in self.policy.index.unknown:
            one.taken.begun()
            self.blocks[one.worker].update(one.hashes)
            self.policy.index.apply(one.worker, [BlockEvent(BlockChange.STORED, 0, tuple(one.hashes))])
        one.taken.ended()

    def _check(self) -> None:
        self.policy.counted.look(LOOKS_MAX)
        for place, one in enumerate(self.following):
            if one.worker not in self.policy.index.unknown:
                before = [each.hashes for each in self.following[:place] if each.worker == one.worker]
                computed = max((len(_common(one.hashes, hashes)) for hashes in before), default=0)
                cached = len([*takewhile(self.blocks[one.worker].__contains__, one.hashes)])
                one.least = min(one.least, max(computed, cached) * PAGE)
                assert one.overlap - one.taken.lost == one.least


def _hashes(request: Generate) -> tuple[int, ...]:
    assert request.hints is not None
    return tuple(request.hints.blocks[0].hashes)


def _common(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))]


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_what_is_lost_is_what_neither_the_cache_has_nor_an_earlier_request_computes(seed: int) -> None:
    caches = Caches(random.Random(seed))
    for _ in range(100):
        caches.step()
    for one in caches.following:
        one.taken.ended()
    assert len(caches.policy.counted) == len(caches.policy.expected) == 0
