"""The blocks that workers have computed just now, and of which their events may not have come yet.

A router knows that a prompt is computed, or a request answered, before it hears of the blocks: the next turn of a
conversation may come within a millisecond. So what is known to be in a cache soon is kept for a moment, until the
worker has told of it. What an engine drops within that moment is expected in vain.

The holder of a block is named by its bit in the index (`PrefixIndex`), which ends with the life of its cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field

RECENT_S = 0.5
RECENT_MAX = 4096


@define(eq=False)
class RecentBlocks:
    """Blocks that follow each other in one prompt or answer, each for `RECENT_S`; `now` returns the time in seconds.

    They are found by the first of them: of two rows of one holder that begin alike the later one is kept, and a row of
    which the holder has told a part is found no more.
    """

    now: Callable[[], float]
    _rows: OrderedDict[tuple[int, int], tuple[float, Sequence[int]]] = field(factory=OrderedDict)  # by when they end
    _holders: dict[int, int] = field(factory=dict)  # by the first block of a row: the bits of those that have one

    def __len__(self) -> int:
        """Return the number of rows."""
        self._drop_old()
        return len(self._rows)

    def add(self, bit: int, hashes: Sequence[int]) -> None:
        """Add blocks of a holder, the first of which it has not told of; beyond `RECENT_MAX` the oldest row goes."""
        if not hashes:
            return
        self._drop_old()
        key, rows = (bit, hashes[0]), self._rows
        rows[key] = self.now() + RECENT_S, hashes
        rows.move_to_end(key)
        self._holders[hashes[0]] = self._holders.get(hashes[0], 0) | bit
        if len(rows) > RECENT_MAX:
            self._drop_oldest()

    def holders(self, first: int) -> int:
        """Return the bits of those that have computed a row from a block on."""
        return self._holders.get(first, 0)

    def extend(self, bit: int, hashes: Sequence[int], count: int) -> int:
        """Return how many of a prompt's blocks a holder has, if it has told of the first `count`."""
        if rows := self._rows:
            self._drop_old()
            while count < len(hashes) and (row := rows.get((bit, hashes[count]))) is not None:
                count += _common(hashes, count, row[1])
        return count

    def _drop_old(self) -> None:
        rows, now = self._rows, self.now()
        while rows and next(iter(rows.values()))[0] <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        (bit, first), _ = self._rows.popitem(last=False)
        if left := self._holders[first] & ~bit:
            self._holders[first] = left
        else:
            del self._holders[first]


def _common(hashes: Sequence[int], start: int, row: Sequence[int]) -> int:
    """Return how many blocks of a prompt from a place on are those of a row; the first is, and behind others none."""
    low, high = 1, min(len(row), len(hashes) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[start + middle - 1] == row[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
