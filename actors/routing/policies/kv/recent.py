"""Blocks computed by workers just now, perhaps before their events have come.

A first token or an answer reaches a router before the events of its blocks: the next turn of a conversation may come
within a millisecond. So these blocks are kept for a moment, until the worker has reported them. Blocks dropped by an
engine before their report are expected in vain.

The holder of a block is named by its bit in the index (`PrefixIndex`), which ends with the life of its cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

RECENT_S = 0.5
RECENT_MAX = 4096
RUN_MAX = 8192  # blocks of one run: more would hold up the loop, and their events come soon


@frozen
class _Run:
    """Consecutive blocks of one prompt or answer, from `start` on."""

    ends_at: float
    hashes: Sequence[int]
    start: int = 0

    def common(self, hashes: Sequence[int], index: int) -> int:
        """Return how many of a prompt's blocks, from an index on, are the run's; the first one is."""
        run, start = self.hashes, self.start
        low, high = 1, min(len(run) - start, len(hashes) - index)
        while low < high:  # behind a different block all are
            middle = (low + high + 1) // 2
            if hashes[index + middle - 1] == run[start + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def after(self, count: int) -> _Run:
        """Return the run without its first blocks."""
        return _Run(self.ends_at, self.hashes, self.start + count)


@define(eq=False)
class RecentBlocks:
    """Runs of blocks of prompts and answers, each for `RECENT_S`; `now` returns the time in seconds.

    A run is found by its first unreported block. If two runs of a holder share a first block, the newer run is kept,
    and only the older run's extra blocks.
    """

    now: Callable[[], float]
    _runs: OrderedDict[tuple[int, int], _Run] = field(factory=OrderedDict)  # runs by bit and first block
    _holders: dict[int, int] = field(factory=dict)  # by the first block of a run: the bitmap of its holders

    def __len__(self) -> int:
        """Return the number of runs."""
        self._drop_old()
        return len(self._runs)

    def add(self, bit: int, hashes: Sequence[int]) -> None:
        """Add a holder's blocks, of which the first is unreported; beyond `RECENT_MAX` the oldest run is dropped.

        Blocks behind the first `RUN_MAX` are left out.
        """
        self._drop_old()
        hashes = hashes[:RUN_MAX]
        self.reported(bit, hashes)  # the rest of these runs is kept
        self._put(bit, _Run(self.now() + RECENT_S, hashes))
        if len(self._runs) > RECENT_MAX:
            self._drop_oldest()

    def reported(self, bit: int, hashes: Sequence[int]) -> None:
        """Drop a holder's reported blocks from its runs; the blocks behind them stay."""
        holders = self._holders
        if holders.keys().isdisjoint(hashes):
            return
        for index, number in enumerate(hashes):
            if holders.get(number, 0) & bit:
                run = self._remove(bit, number)
                self._put(bit, run.after(run.common(hashes, index)))

    def holders(self, first: int) -> int:
        """Return the bitmap of holders with a run from a block on, old runs included."""
        return self._holders.get(first, 0)

    def extend(self, bit: int, hashes: Sequence[int], count: int) -> int:
        """Return how many of a prompt's blocks a holder has, if it has reported the first `count`."""
        if runs := self._runs:
            while count < len(hashes) and (run := runs.get((bit, hashes[count]))) is not None:
                if run.ends_at <= self.now():
                    break
                count += run.common(hashes, count)
        return count

    def _put(self, bit: int, run: _Run) -> None:
        if run.start < len(run.hashes):
            first = run.hashes[run.start]
            self._runs[bit, first] = run
            self._runs.move_to_end((bit, first))
            self._holders[first] = self._holders.get(first, 0) | bit

    def _remove(self, bit: int, first: int) -> _Run:
        if left := self._holders[first] & ~bit:
            self._holders[first] = left
        else:
            del self._holders[first]
        return self._runs.pop((bit, first))

    def _drop_old(self) -> None:
        """Drop the ended runs; a cut run behind others that end later is dropped with them."""
        runs, now = self._runs, self.now()
        while runs and next(iter(runs.values())).ends_at <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._remove(*next(iter(self._runs)))
