"""Ranges of a memory: none overlap, and all that is given back can be taken again as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.tensors.memory_ranges import ALIGNMENT, MemoryRanges


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=60))
def test_ranges_never_overlap_and_join_again(steps: list[tuple[bool, int]]) -> None:
    ranges, taken = MemoryRanges(128, 128 + 64 * 100), dict[int, int]()
    for takes, number in steps:
        if takes or not taken:
            if (offset := ranges.take(number)) is not None:
                assert offset % ALIGNMENT == 0
                assert 128 <= offset <= 128 + 64 * 100 - number
                assert all(offset + number <= other or other + size <= offset for other, size in taken.items())
                taken[offset] = number
        else:
            offset = sorted(taken)[number % len(taken)]
            ranges.give_back(offset, taken.pop(offset))
    for offset, size in taken.items():
        ranges.give_back(offset, size)
    assert ranges.free_bytes == 64 * 100
    assert ranges.take(64 * 100) == 128


def test_a_range_is_taken_only_where_it_fits_as_a_whole() -> None:
    ranges = MemoryRanges(0, 192)
    assert [ranges.take(64), ranges.take(1), ranges.take(64), ranges.take(1)] == [0, 64, 128, None]
    ranges.give_back(0, 64)
    ranges.give_back(128, 64)
    assert ranges.take(65) is None
    ranges.give_back(64, 1)
    assert ranges.take(192) == 0
