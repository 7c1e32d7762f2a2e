"""The blocks that workers have computed just now, and of which their events may not have come yet.

A router knows that a prompt is computed, or a request answered, before it hears of the blocks: the next turn of a
conversation may come within a millisecond. So what is known to be in a cache soon is kept for a moment, until the
worker has told of it. What an engine drops within that moment is expected in vain.

The holder of a block is named by its bit in the index (`PrefixIndex`), which ends with the life of its cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from attrs import define, field

RECENT_S = 0.5
RECENT_MAX = 65_536


@define(eq=False)
class RecentBlocks:
    """The blocks of holders, each for `RECENT_S` from when it was added last; `now` returns the time in seconds."""

    now: Callable[[], float]
    _until: OrderedDict[tuple[int, int], float] = field(factory=OrderedDict)  # the first that end come first

    def __len__(self) -> int:
        """Return the number of blocks."""
        self._drop_old(self.now())
        return len(self._until)

    def add(self, bit: int, hashes: Iterable[int]) -> None:
        """Add blocks of a holder; beyond `RECENT_MAX` the oldest go."""
        until, blocks = self.now() + RECENT_S, self._until
        for number in hashes:
            blocks[bit, number] = until
            blocks.move_to_end((bit, number))
        while len(blocks) > RECENT_MAX:
            blocks.popitem(last=False)

    def extend(self, bit: int, hashes: Sequence[int], count: int) -> int:
        """Return how many of a prompt's blocks a holder has, if it has told of the first `count`."""
        blocks = self._until
        if blocks:
            self._drop_old(self.now())
            while count < len(hashes) and (bit, hashes[count]) in blocks:
                count += 1
        return count

    def _drop_old(self, now: float) -> None:
        blocks = self._until
        while blocks and next(iter(blocks.values())) <= now:
            blocks.popitem(last=False)
