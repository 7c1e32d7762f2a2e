"""The prefix index of a model: the holders of each block of a prefix cache, as one bitmap a block.

A block is named by its hash, which stands for all tokens up to its end (`protocol/block_hashes.py`). For each hash the
index keeps one bitmap, an integer with a bit for every holder. So a prompt is matched against any number of workers at
once, by one look-up a block; and holders are separated only where they differ:

    block of the prompt      first   second   third   fourth
    bitmap of holders ABC    111     111      101     100
    match                            B: 2     C: 3    A: 4

A holder is one rank in one life of its cache. An emptied cache (by a flush, a restart, a gap in its events) retires its
bit at once, and the worker begins with another: a retired bit matches nothing, and `sweep` removes it from the blocks a
few thousand at a time. Blocks are limited in number; the least recently used of a shard is dropped first.

Reports may be late, so an overlap is a prediction.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from attrs import define, field, frozen

from protocol.messages.kv_events import GPU, BlockChange, BlockEvent

SHARDS = 256
BLOCKS_MAX = 1_000_000
TURN_MAX = 4096  # blocks swept in one turn of the loop, in some 2 ms
TOUCHED_ONE_OF = 8  # one of so many matches is recorded, in an index that is more than half full
TOUCHED_FOR_STORED = 4  # the most blocks touched for each block that is stored
TOUCHED_AGAIN = 1 / 8  # the share of the index to be stored before blocks are touched again
TOUCHING_MAX = 8  # prompts to be touched
TOUCHED_MAX = 64  # prompts touched last

Holder: TypeAlias = tuple[str, int]
"""The name of an engine, and the number of one of its ranks."""


@frozen
class Match:
    """The holders of one prompt's prefixes: a bitmap for each number of blocks held."""

    groups: tuple[tuple[int, int], ...]  # the number of blocks, the longest prefix last; and the holders' bitmap
    bits: Mapping[Holder, int]
    holders: Sequence[Holder | None]

    def blocks(self, worker: str, rank: int = 0) -> int:
        """Return the number of the prompt's blocks in a rank's cache, from the first one on."""
        return self.blocks_of(self.bit(worker, rank))

    def blocks_of(self, bit: int) -> int:
        """Return the same for a holder's bit."""
        for count, mask in reversed(self.groups):
            if mask & bit:
                return count
        return 0

    def bit(self, worker: str, rank: int = 0) -> int:
        """Return the bit of a rank in this life of its cache, 0 without a report of it."""
        return self.bits.get((worker, rank), 0)

    def longest(self, holders_max: int) -> Iterator[Holder]:
        """Yield holders, by falling number of blocks, up to a number of holders."""
        yield from islice((holder for _, mask in reversed(self.groups) for holder in self.named(mask)), holders_max)

    def named(self, bits: int) -> Iterator[Holder]:
        """Yield the holders of a bitmap; a retired bit has none."""
        while bits:
            bit = bits & -bits
            bits ^= bit
            if (holder := self.holders[bit.bit_length() - 1]) is not None:
                yield holder


@frozen
class IndexStatistics:
    """The size of an index: its blocks, its holders, and the blocks dropped so far."""

    blocks: int
    holders: int
    dropped: int


@frozen
class _Touched:
    """The last touched block of a prompt, its index there, and the number of blocks that the index had stored then."""

    index: int
    number: int
    stored: int


@define(eq=False)
class PrefixIndex:
    """The blocks of the workers of one model, `blocks_max` different ones at most.

    The `unknown` workers can be asked, but have not reported all their blocks yet. `on_stored` is called with the bit
    of a holder and its reported blocks.
    """

    blocks_max: int = BLOCKS_MAX
    unknown: set[str] = field(factory=set)
    on_stored: Callable[[int, Sequence[int]], None] | None = None
    dropped: int = 0
    _blocks: int = 0
    _shards: list[OrderedDict[int, int]] = field(factory=lambda: [OrderedDict() for _ in range(SHARDS)])
    _bits: dict[Holder, int] = field(factory=dict)
    _holders: list[Holder | None] = field(factory=list)  # holders by the number of the bit
    _used: int = 0  # the bits of the holders
    _retired: int = 0  # bits that blocks may still have
    _sweeping: int = 0  # the retired bits that the present round removes
    _next_shard: int = 0
    _unswept: list[int] = field(factory=list)  # the rest of the shard before it
    _stored: int = 0  # the number of blocks stored so far
    _matches: int = 0  # the number of matches since the index is half full
    _touching: deque[tuple[Sequence[int], int]] = field(factory=deque)  # prompts, and the number of blocks to touch
    _touched: deque[_Touched] = field(factory=lambda: deque(maxlen=TOUCHED_MAX))  # these prompts and former ones

    def statistics(self) -> IndexStatistics:
        """Return the size of the index."""
        return IndexStatistics(self._blocks, len(self._bits), self.dropped)

    # Reports of workers -------------------------------------------------------------------

    def apply(self, worker: str, events: Iterable[BlockEvent]) -> None:
        """Apply the events of a worker's ranks; blocks of LoRA adapters and of slower media are left out."""
        for event in events:
            holder = (worker, event.rank)
            if event.change is BlockChange.CLEARED:
                self._retire(holder)
            elif event.medium != GPU or event.lora is not None:
                continue
            elif event.change is BlockChange.STORED:
                stored = self._bit(holder)
                self._store(stored, event.hashes)
                if self.on_stored is not None:
                    self.on_stored(stored, event.hashes)
            else:
                self._remove(holder, event.hashes)

    def add_holders(self, worker: str, ranks: int) -> None:
        """Give each rank of a worker a bit after a resync, also a rank that has reported no blocks."""
        for rank in range(ranks):
            self._bit((worker, rank))

    def forget(self, worker: str) -> None:
        """Forget all blocks of a worker."""
        for holder in [holder for holder in self._bits if holder[0] == worker]:
            self._retire(holder)

    def _store(self, bit: int, hashes: Sequence[int]) -> None:
        shards, shard_max = self._shards, max(1, self.blocks_max // SHARDS)
        for number in reversed(hashes):  # the end of a prefix is to be dropped first
            shard = shards[number & 255]
            before = shard.get(number)
            if before is None:
                if len(shard) >= shard_max:
                    shard.popitem(last=False)
                    self._blocks -= 1
                    self.dropped += 1
                shard[number] = bit
                self._blocks += 1
            else:
                if not before & bit:
                    shard[number] = before | bit
                shard.move_to_end(number)
        self._stored += len(hashes)
        if self._touching:
            self._touch(min(TOUCHED_FOR_STORED * len(hashes), TURN_MAX))

    def _remove(self, holder: Holder, hashes: Sequence[int]) -> None:
        """Remove blocks of a holder."""
        if (bit := self._bits.get(holder)) is None:
            return
        for number in hashes:
            shard = self._shards[number & 255]
            if (before := shard.get(number, 0)) & bit:
                if left := before & ~bit:
                    shard[number] = left
                else:
                    del shard[number]
                    self._blocks -= 1

    # Bits --------------------------------------------------------------------------------

    def _bit(self, holder: Holder) -> int:
        """Return the bit of a holder, a new one if it has none."""
        if (bit := self._bits.get(holder)) is not None:
            return bit
        taken = self._used | self._retired
        bit = ~taken & (taken + 1)  # the lowest that is free
        index = bit.bit_length() - 1
        while len(self._holders) <= index:
            self._holders.append(None)
        self._holders[index], self._bits[holder] = holder, bit
        self._used |= bit
        return bit

    def _retire(self, holder: Holder) -> None:
        if (bit := self._bits.pop(holder, None)) is not None:
            self._holders[bit.bit_length() - 1] = None
            self._used &= ~bit
            self._retired |= bit

    @property
    def unswept(self) -> bool:
        """Whether there are retired bits to remove."""
        return self._retired != 0

    def sweep(self) -> None:
        """Remove retired bits from some blocks of a shard; to be called, with pauses, while `unswept`."""
        if not self._unswept:
            if not self._next_shard:
                self._sweeping = self._retired
            self._unswept = [*self._shards[self._next_shard]]
            self._next_shard = (self._next_shard + 1) % SHARDS
        gone, shard = self._sweeping, self._shards[self._next_shard - 1]
        for number in self._unswept[-TURN_MAX:]:
            if (bits := shard.get(number, 0)) & gone:  # one may have been dropped meanwhile
                if left := bits & ~gone:
                    shard[number] = left
                else:
                    del shard[number]
                    self._blocks -= 1
        del self._unswept[-TURN_MAX:]
        if not self._unswept and not self._next_shard:
            self._retired &= ~gone  # none of these is set any more: none was set while it was retired

    # Matches of prompts ------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> Match:
        """Return the holders of a prompt's prefixes, by its blocks; these count as used now.

        A holder of a block has all blocks before it, since caches drop the ends of prompts first. So no held prefix
        ends between two blocks with the same holders, and all ends are found by bisection.
        """
        groups, shards, low = list[tuple[int, int]](), self._shards, 0
        having = self._holding(hashes[0]) & self._used if hashes else 0
        ahead = [(len(hashes), 0)]  # blocks with their holders, the next one last; none has what follows the prompt
        while having:
            high, still = ahead[-1]
            if not (ended := having & ~still):
                low = high
                ahead.pop()
            elif high - low == 1:
                groups.append((high, ended))
                low, having = high, having & still
                ahead.pop()
            else:
                middle = (low + high) // 2
                ahead.append((middle, shards[(n := hashes[middle]) & 255].get(n, 0) & having))
        if groups and 2 * self._blocks > self.blocks_max:  # else nothing is dropped soon
            self._touch_later(hashes, groups[-1][0])
        return Match(tuple(groups), self._bits, self._holders)

    def reported(self, worker: str, rank: int, hashes: Sequence[int]) -> tuple[int, int]:
        """Return the bit of a rank, 0 without a report of it, and how many of a prompt's blocks it has reported."""
        bit = self._bits.get((worker, rank), 0)
        low, high = 0, len(hashes) if bit else 0
        while low < high:
            middle = (low + high) // 2
            if self._holding(hashes[middle]) & bit:
                low = middle + 1
            else:
                high = middle
        return bit, low

    def _holding(self, number: int) -> int:
        return self._shards[number & 255].get(number, 0)

    # Blocks in use -----------------------------------------------------------------------

    def _touch_later(self, hashes: Sequence[int], count: int) -> None:
        """Let the first blocks of a prompt count as used, at one match of eight: enough to keep those in frequent use.

        A hash draws the match: of prompts that come in turns some would never be among every eighth. A match itself
        touches nothing. Blocks grow older only as others are stored, and for each of these some are touched, so the
        cost of a choice does not grow with its prompt.
        """
        self._matches += 1
        if hash((self._matches, hashes[0])) % TOUCHED_ONE_OF or len(self._touching) >= TOUCHING_MAX:
            return
        since = self._stored - TOUCHED_AGAIN * self.blocks_max
        for last in self._touched:
            if last.stored > since and last.index < count and hashes[last.index] == last.number:
                return  # this prompt, or the one before it in its conversation
        self._touched.append(_Touched(count - 1, hashes[count - 1], self._stored))
        self._touching.append((hashes, count))

    def _touch(self, number_max: int) -> None:
        """Count some blocks as used now, the last ones of a prompt first: its beginning is to be dropped last."""
        while number_max and self._touching:
            hashes, count = self._touching.popleft()
            start = max(0, count - number_max)
            number_max -= count - start
            for number in reversed(hashes[start:count]):
                shard = self._shards[number & 255]
                if number in shard:  # one in between may have been dropped
                    shard.move_to_end(number)
            if start:
                self._touching.appendleft((hashes, start))
