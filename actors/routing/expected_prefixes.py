"""The prompts that a router has given to workers, and of which no first token has come yet.

Their blocks are in no cache, but will be soon: a second request with the same beginning computes less of it where the
first one is. Without this, requests that arrive together and share a beginning would each be the first one of some
worker. Requests are grouped by the hash of their first block; some of a group are compared, since all may begin alike.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import takewhile

from attrs import define, field, frozen

GROUP_MAX = 32
"""The most prompts of one first block that are compared; the older ones are left out."""


@frozen(eq=False)
class ExpectedPrefix:
    """One prompt at one worker, by the hashes of its blocks."""

    worker: str
    hashes: Sequence[int]


@define(eq=False)
class ExpectedPrefixes:
    """The prompts that have not begun."""

    _groups: dict[int, OrderedDict[int, ExpectedPrefix]] = field(factory=dict)  # by first block and identity

    def __len__(self) -> int:
        """Return the number of prompts."""
        return sum(map(len, self._groups.values()))

    def add(self, worker: str, hashes: Sequence[int]) -> ExpectedPrefix | None:
        """Add a prompt of a worker; return what `discard` removes, None for a prompt without a full block."""
        if not hashes:
            return None
        prefix = ExpectedPrefix(worker, hashes)
        group = self._groups.setdefault(hashes[0], OrderedDict())
        group[id(prefix)] = prefix
        return prefix

    def discard(self, prefix: ExpectedPrefix) -> None:
        """Remove a prompt; idempotent."""
        group = self._groups.get(prefix.hashes[0])
        if group is not None and group.pop(id(prefix), None) is not None and not group:
            del self._groups[prefix.hashes[0]]

    def blocks_before(self, prefix: ExpectedPrefix) -> int:
        """Return how many blocks a prompt has in common with those that its worker was given before it."""
        earlier = takewhile(lambda each: each is not prefix, self._groups[prefix.hashes[0]].values())
        latest = deque((each for each in earlier if each.worker == prefix.worker), GROUP_MAX)
        return max((_common(prefix.hashes, each.hashes) for each in latest), default=0)

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
