"""The division of a memory into ranges, by first fit: what is given back joins its free neighbours."""

from __future__ import annotations

from bisect import bisect_left

from attrs import define, field

ALIGNMENT = 64


@define(eq=False)
class MemoryRanges:
    """The free ranges of a memory from `begin` to `end`, in the order of their offsets.

    First fit keeps the ranges in use near the beginning, so that the rest of a memory costs nothing until it is needed.
    """

    begin: int
    end: int
    _free: list[tuple[int, int]] = field(init=False)  # offsets of the first byte and of the byte behind the last

    def __attrs_post_init__(self) -> None:
        self._free = [(self.begin, self.end)]

    @property
    def free_bytes(self) -> int:
        """The bytes that are not taken."""
        return sum(end - begin for begin, end in self._free)

    def take(self, size: int) -> int | None:
        """Take at least `size` bytes, and return the offset of the first one; None if there is no such range."""
        size = _aligned(size)
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Give back what `take` returned for this size."""
        begin, end = offset, offset + _aligned(size)
        place = bisect_left(self._free, (begin, end))
        first, last = place, place
        if place and self._free[place - 1][1] == begin:
            first, begin = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            last, end = place + 1, self._free[place][1]
        self._free[first:last] = [(begin, end)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
