"""The prefixes that requests on their way count on: for each the last block that it is expected to find.

Caches drop the ends of prompts first, so as long as this block is there, all before it are. Once such a block may be
gone, the requests of its worker look at what is left, in the order in which they were given to it: the first one finds
less, and computes it again for those after it.

A worker may tell anything, at any rate, and many clients may leave at once. So few requests look at a time, and what is
left of them looks after the next change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from attrs import define, field

from actors.routing.prefix_index import Holder

LOOKS_MAX = 16  # after a message of a worker, in some 0.2 ms, or 1 ms if prompts are very long
FEW_LOOKS_MAX = 2  # after a request was given to a worker, has begun or has left


@define(eq=False)
class CountedPrefix:
    """A prefix that a request counts on in the cache of a holder.

    `look` notes what is left of it. `turn` orders the requests of all workers.
    """

    holder: Holder
    turn: int
    look: Callable[[], None]
    numbers: Sequence[int] = ()  # its last blocks, one for each page size


@define(eq=False)
class _Queue:
    """The prefixes of one holder in the order of their turns, and how many count on each block."""

    prefixes: list[CountedPrefix] = field(factory=list)
    numbers: Counter[int] = field(factory=Counter)

    def place(self, turn: int) -> int:
        """Return the place of the first prefix from a turn on."""
        return bisect_left(self.prefixes, turn, key=_TURN)


_TURN = attrgetter("turn")


@define(eq=False)
class CountedBlocks:
    """The prefixes by their holders, and the holders of which blocks may be gone that nobody has looked for yet."""

    _queues: dict[Holder, _Queue] = field(factory=dict)
    _doubted: dict[Holder, int] = field(factory=dict)  # the turn from which on prefixes may have lost something

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return sum(len(queue.prefixes) for queue in self._queues.values())

    def count(self, prefix: CountedPrefix, numbers: Sequence[int]) -> None:
        """Count on the last blocks of a prefix instead of those before; on none, no more. Idempotent."""
        queue = self._queues.setdefault(prefix.holder, _Queue())
        place = queue.place(prefix.turn)
        is_there = bool(prefix.numbers)
        queue.numbers.subtract(prefix.numbers)
        queue.numbers.update(numbers)
        for number in prefix.numbers:
            if not queue.numbers[number]:
                del queue.numbers[number]
        prefix.numbers = numbers
        if numbers and not is_there:
            queue.prefixes.insert(place, prefix)
        elif is_there and not numbers:
            del queue.prefixes[place]
        if not queue.prefixes:
            del self._queues[prefix.holder]
            self._doubted.pop(prefix.holder, None)

    def may_be_gone(self, blocks: Mapping[Holder, Collection[int] | None]) -> None:
        """Let requests look that count on some blocks; None for any block of a holder."""
        for holder, hashes in blocks.items():
            self.doubt(holder, hashes)
        self.look(LOOKS_MAX)

    def doubt(self, holder: Holder, hashes: Collection[int] | None, turn: int = 0) -> None:
        """Let the requests of a holder look from a turn on if any counts on some blocks, or on any block."""
        queue = self._queues.get(holder)
        if queue is not None and (hashes is None or not queue.numbers.keys().isdisjoint(hashes)):
            self._doubted[holder] = min(turn, self._doubted.get(holder, turn))

    def is_doubted(self, prefix: CountedPrefix) -> bool:
        """Whether something of a prefix may be gone that its request has not looked for."""
        turn = self._doubted.get(prefix.holder)
        return turn is not None and bool(prefix.numbers) and prefix.turn >= turn

    def look(self, looks_max: int = FEW_LOOKS_MAX) -> None:
        """Let a few requests look: of each holder in turn the first that has not looked."""
        for _ in range(looks_max):
            if not self._doubted:
                return
            holder, turn = next(iter(self._doubted.items()))
            del self._doubted[holder]
            queue = self._queues[holder]
            place = queue.place(turn)
            if place < len(queue.prefixes):
                prefix = queue.prefixes[place]
                if place + 1 < len(queue.prefixes):
                    self._doubted[holder] = prefix.turn + 1  # behind the other holders
                prefix.look()
