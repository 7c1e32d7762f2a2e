"""The blocks that workers have computed just now, and of which their events may not have come yet.

A router knows that a prompt is computed, or a request answered, before it hears of the blocks: the next turn of a
conversation may come within a millisecond. So what is known to be in a cache soon is kept for a moment, until the
worker has told of it. What an engine drops before it has told of it is expected in vain.

The holder of a block is named by its bit in the index (`PrefixIndex`), which ends with the life of its cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

RECENT_S = 0.5
RECENT_MAX = 4096
ROW_MAX = 8192  # blocks of one row: more would hold up the loop, and their events come soon


@frozen
class _Row:
    """The blocks of a row from `start` on."""

    ends_at: float
    hashes: Sequence[int]
    start: int = 0

    def common(self, hashes: Sequence[int], place: int) -> int:
        """Return how many of a prompt's blocks from a place on are those of the row, as the first one is."""
        row, start = self.hashes, self.start
        low, high = 1, min(len(row) - start, len(hashes) - place)
        while low < high:  # behind a different block all are
            middle = (low + high + 1) // 2
            if hashes[place + middle - 1] == row[start + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def after(self, count: int) -> _Row:
        """Return the row without its first blocks."""
        return _Row(self.ends_at, self.hashes, self.start + count)


@define(eq=False)
class RecentBlocks:
    """Blocks that follow each other in one prompt or answer, each for `RECENT_S`; `now` returns the time in seconds.

    They are found by the first of them that the holder has not told of. Of two rows of one holder that begin alike the
    later one is kept as a whole, and of the other what it has besides.
    """

    now: Callable[[], float]
    _rows: OrderedDict[tuple[int, int], _Row] = field(factory=OrderedDict)  # by bit and first block
    _holders: dict[int, int] = field(factory=dict)  # by the first block of a row: the bits of those that have one

    def __len__(self) -> int:
        """Return the number of rows."""
        self._drop_old()
        return len(self._rows)

    def add(self, bit: int, hashes: Sequence[int]) -> None:
        """Add blocks of a holder, the first of which it has not told of; beyond `RECENT_MAX` the oldest row goes.

        Those behind the first `ROW_MAX` are left out.
        """
        self._drop_old()
        hashes = hashes[:ROW_MAX]
        self.told(bit, hashes)  # rows keep what they have besides
        self._put(bit, _Row(self.now() + RECENT_S, hashes))
        if len(self._rows) > RECENT_MAX:
            self._drop_oldest()

    def told(self, bit: int, hashes: Sequence[int]) -> None:
        """Expect no more what a holder has told of, but still what follows that in a row."""
        holders = self._holders
        if holders.keys().isdisjoint(hashes):
            return
        for place, number in enumerate(hashes):
            if holders.get(number, 0) & bit:
                row = self._remove(bit, number)
                self._put(bit, row.after(row.common(hashes, place)))

    def holders(self, first: int) -> int:
        """Return the bits of those that have computed a row from a block on, some of them longer ago."""
        return self._holders.get(first, 0)

    def extend(self, bit: int, hashes: Sequence[int], count: int) -> int:
        """Return how many of a prompt's blocks a holder has, if it has told of the first `count`."""
        if rows := self._rows:
            while count < len(hashes) and (row := rows.get((bit, hashes[count]))) is not None:
                if row.ends_at <= self.now():
                    break
                count += row.common(hashes, count)
        return count

    def _put(self, bit: int, row: _Row) -> None:
        if row.start < len(row.hashes):
            first = row.hashes[row.start]
            self._rows[bit, first] = row
            self._rows.move_to_end((bit, first))
            self._holders[first] = self._holders.get(first, 0) | bit

    def _remove(self, bit: int, first: int) -> _Row:
        if left := self._holders[first] & ~bit:
            self._holders[first] = left
        else:
            del self._holders[first]
        return self._rows.pop((bit, first))

    def _drop_old(self) -> None:
        """Drop the rows that have ended; one that was cut may be behind others that end later, and goes with them."""
        rows, now = self._rows, self.now()
        while rows and next(iter(rows.values())).ends_at <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._remove(*next(iter(self._rows)))
