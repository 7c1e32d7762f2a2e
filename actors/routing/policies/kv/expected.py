"""The prompts in flight: given to workers, without a first token yet.

Their blocks are in no cache, but will be soon: a second request with the same prefix computes less of it at the first
one's worker. Without this, requests that arrive together with one prefix would each be the first one of some worker.
Requests are grouped by the hash of their first block; only some of a group are compared, since all may begin alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from attrs import define, field, frozen

GROUP_MAX = 32
"""The most prompts of one first block that are compared; older ones are left out."""


@frozen(eq=False)
class ExpectedPrefix:
    """One prompt at one worker, by the hashes of its blocks."""

    worker: str
    hashes: Sequence[int]


@define(eq=False)
class ExpectedPrefixes:
    """The prompts that have not begun."""

    _groups: dict[int, OrderedDict[ExpectedPrefix, None]] = field(factory=dict)  # by first block, the latest last

    def __len__(self) -> int:
        """Return the number of prompts."""
        return sum(map(len, self._groups.values()))

    def add(self, worker: str, hashes: Sequence[int]) -> ExpectedPrefix | None:
        """Add a prompt of a worker; return what `discard` removes, None for a prompt without a full block."""
        if not hashes:
            return None
        prefix = ExpectedPrefix(worker, hashes)
        self._groups.setdefault(hashes[0], OrderedDict())[prefix] = None
        return prefix

    def discard(self, prefix: ExpectedPrefix) -> None:
        """Remove a prompt; idempotent."""
        first = prefix.hashes[0]
        if (group := self._groups.get(first)) is not None:
            group.pop(prefix, None)
            if not group:
                del self._groups[first]

    def blocks(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return, by worker, the length of the longest common prefix of a prompt with the prompts there, in blocks."""
        found: dict[str, int] = {}
        if not hashes or (group := self._groups.get(hashes[0])) is None:
            return found
        common = 1
        for prefix in islice(reversed(group), GROUP_MAX):
            common = _common(hashes, prefix.hashes, common)
            if common > found.get(prefix.worker, 0):
                found[prefix.worker] = common
        return found


def _common(left: Sequence[int], right: Sequence[int], guess: int) -> int:
    """Return the number of equal blocks; the first are equal, and behind a different one all are.

    A right guess takes two comparisons. Most prompts of a group part at the same block: behind their system prompt.
    """
    low, high = 1, min(len(left), len(right))
    if low < guess <= high:
        if left[guess - 1] != right[guess - 1]:
            high = guess - 1
        elif guess == high or left[guess] != right[guess]:
            return guess
        else:
            low = guess
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
