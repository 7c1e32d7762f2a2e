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
RUN_MAX = 8192  # blocks of one run: the events of more come soon


@frozen
class _Run:
    """Consecutive blocks of one prompt or answer: those from `start` to before `end` of `hashes`.

    `before` is the number of blocks of the whole prefix before the first of `hashes`. A hash stands for all tokens up
    to the end of its block, so it has one place in every prefix: two runs are compared there, without a search.
    """

    ends_at: float
    hashes: Sequence[int]
    start: int
    end: int
    before: int

    @property
    def place(self) -> int:
        """The number of blocks before its first one."""
        return self.before + self.start

    def common(self, hashes: Sequence[int], index: int, end: int) -> int:
        """Return how many of a prompt's blocks, from an index on to before `end`, are the run's; the first one is."""
        run, start = self.hashes, self.start
        low, high = 1, min(self.end - start, end - index)
        while low < high:  # behind a different block all are
            middle = (low + high + 1) // 2
            if hashes[index + middle - 1] == run[start + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def after(self, count: int) -> _Run:
        """Return the run without its first blocks."""
        return _Run(self.ends_at, self.hashes, self.start + count, self.end, self.before)


@define(eq=False)
class RecentBlocks:
    """Runs of blocks of prompts and answers, each for `RECENT_S`; `now` returns the time in seconds.

    A run is found by its first unreported block. If two runs of a holder share a first block, the newer run is kept,
    and only the older run's extra blocks.
    """

    now: Callable[[], float]
    _runs: OrderedDict[tuple[int, int], _Run] = field(factory=OrderedDict)  # runs by bit and first block
    _places: dict[int, dict[int, int]] = field(factory=dict)  # by bit and first block, the place of a run
    _holders: dict[int, int] = field(factory=dict)  # by the first block of a run: the bitmap of its holders

    def __len__(self) -> int:
        """Return the number of runs."""
        self._drop_old()
        return len(self._runs)

    def add(self, bit: int, hashes: Sequence[int], start: int = 0, before: int = 0) -> None:
        """Add a holder's blocks, from the index `start` on, of which the first is unreported.

        `before` blocks of the prefix precede `hashes`. Beyond `RECENT_MAX` the oldest run is dropped. Blocks behind
        the first `RUN_MAX` are left out. The cost grows with the holder's runs, not with the blocks.
        """
        self._drop_old()
        run = _Run(self.now() + RECENT_S, hashes, start, min(len(hashes), start + RUN_MAX), before)
        places = ((place - before, first) for first, place in self._places.get(bit, {}).items())
        for index, first in sorted((index, first) for index, first in places if start <= index < run.end):
            if hashes[index] == first:
                self._cut(bit, first, hashes, index, run.end)  # the rest of these runs is kept
        self._put(bit, run)
        if len(self._runs) > RECENT_MAX:
            self._drop_oldest()

    def reported(self, bit: int, hashes: Sequence[int]) -> None:
        """Drop a holder's reported blocks from its runs; the blocks behind them stay."""
        holders = self._holders
        if holders.keys().isdisjoint(hashes):
            return
        for index, number in enumerate(hashes):
            if holders.get(number, 0) & bit:
                self._cut(bit, number, hashes, index, len(hashes))

    def holders(self, first: int) -> int:
        """Return the bitmap of holders with a run from a block on, old runs included."""
        return self._holders.get(first, 0)

    def extend(self, bit: int, hashes: Sequence[int], count: int) -> int:
        """Return how many of a prompt's blocks a holder has, if it has reported the first `count`."""
        if bit in self._places:
            runs = self._runs
            while count < len(hashes) and (run := runs.get((bit, hashes[count]))) is not None:
                if run.ends_at <= self.now():
                    break
                count += run.common(hashes, count, len(hashes))
        return count

    def _cut(self, bit: int, first: int, hashes: Sequence[int], index: int, end: int) -> None:
        """Drop the beginning that a run has in common with some blocks, from an index on to before `end`."""
        run = self._remove(bit, first)
        self._put(bit, run.after(run.common(hashes, index, end)))

    def _put(self, bit: int, run: _Run) -> None:
        if run.start < run.end:
            first = run.hashes[run.start]
            self._runs[bit, first] = run
            self._runs.move_to_end((bit, first))
            self._places.setdefault(bit, {})[first] = run.place
            self._holders[first] = self._holders.get(first, 0) | bit

    def _remove(self, bit: int, first: int) -> _Run:
        places = self._places[bit]
        del places[first]
        if not places:
            del self._places[bit]
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
