"""The prompts that a router has given to workers, and of which no first token has come yet.

Their blocks are in no cache, but will be soon: a second request with the same beginning computes less of it where the
first one is. Without this, requests that arrive together and share a beginning would each be the first one of some
worker. Requests are grouped by the hash of their first block; some of a group are compared, since all may begin alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

from attrs import define, field, frozen

GROUP_MAX = 32
"""The most prompts of one first block that are compared, of all workers or of one; the older ones are left out."""


@frozen(eq=False)
class ExpectedPrefix:
    """One prompt at one worker, by the hashes of its blocks."""

    worker: str
    hashes: Sequence[int]
    turn: int


_BY_TURN = attrgetter("turn")


@define(eq=False)
class ExpectedPrefixes:
    """The prompts that have not begun."""

    _groups: dict[int, OrderedDict[int, ExpectedPrefix]] = field(factory=dict)  # by first block and turn
    _rows: dict[tuple[str, int], list[ExpectedPrefix]] = field(factory=dict)  # those of a worker, by its first block
    _turns: int = 0

    def __len__(self) -> int:
        """Return the number of prompts."""
        return sum(map(len, self._groups.values()))

    def add(self, worker: str, hashes: Sequence[int]) -> ExpectedPrefix | None:
        """Add a prompt of a worker; return what `discard` removes, None for a prompt without a full block."""
        if not hashes:
            return None
        self._turns += 1
        prefix = ExpectedPrefix(worker, hashes, self._turns)
        self._groups.setdefault(hashes[0], OrderedDict())[prefix.turn] = prefix
        self._rows.setdefault((worker, hashes[0]), []).append(prefix)
        return prefix

    def discard(self, prefix: ExpectedPrefix) -> None:
        """Remove a prompt; idempotent."""
        first = prefix.hashes[0]
        group = self._groups.get(first)
        if group is None or group.pop(prefix.turn, None) is None:
            return
        if not group:
            del self._groups[first]
        row = self._rows[prefix.worker, first]
        del row[_place(row, prefix)]
        if not row:
            del self._rows[prefix.worker, first]

    def blocks_before(self, prefix: ExpectedPrefix) -> int:
        """Return how many blocks a prompt has in common with those that its worker was given before it."""
        row = self._rows[prefix.worker, prefix.hashes[0]]
        place = _place(row, prefix)
        return max((_common(prefix.hashes, each.hashes) for each in row[max(0, place - GROUP_MAX) : place]), default=0)

    def blocks(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return, by worker, how many blocks of a prompt the prompts there have in common with it."""
        found: dict[str, int] = {}
        if not hashes or (group := self._groups.get(hashes[0])) is None:
            return found
        for number, prefix in enumerate(reversed(group.values())):
            if number >= GROUP_MAX:
                break
            found[prefix.worker] = max(found.get(prefix.worker, 0), _common(hashes, prefix.hashes))
        return found


def _place(row: Sequence[ExpectedPrefix], prefix: ExpectedPrefix) -> int:
    """Return the place of a prompt among those of its worker that begin like it."""
    return bisect_left(row, prefix.turn, key=_BY_TURN)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal blocks; the first are equal, and behind a different one all are."""
    low, high = 1, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
