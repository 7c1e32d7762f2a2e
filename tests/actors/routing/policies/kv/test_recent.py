"""Blocks that are expected for a moment, before their worker tells of them."""

from __future__ import annotations

from random import Random

import pytest
from attrs import define

from actors.routing.policies.kv.recent import RECENT_MAX, RECENT_S, RUN_MAX, RecentBlocks


@define
class Clock:
    now_s: float = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([[1, 2]], [5, 3, 4]),
        ([[4, 5]], [5, 3, 4]),
        ([[3]], [2, 5, 4]),
        ([[1, 2, 3]], [2, 5, 4]),
        ([[3, 8]], [2, 5, 4]),
        ([[9, 3, 4]], [2, 3, 5]),
        ([[3], [4]], [2, 3, 5]),
        ([[3, 4, 5]], [2, 3, 4]),
        ([[3, 4, 5, 6]], [2, 3, 4]),
    ],
)
def test_a_row_is_found_behind_what_its_holder_has_told_of(told: list[list[int]], found: list[int]) -> None:
    recent = RecentBlocks(Clock())
    recent.add(4, [1, 2, 3, 4, 5], 2)
    recent.add(8, [7])
    for hashes in told:
        recent.reported(16, hashes)
        recent.reported(4, hashes)
    assert [recent.extend(4, [1, 2, 3, 4, 5], count) for count in (2, 3, 4)] == found
    assert [recent.holders(number) for number in (3, 7)] == [4 if found[0] == 5 else 0, 8]


def test_of_a_long_row_the_beginning_is_kept() -> None:
    recent, row = RecentBlocks(Clock()), list(range(3 * RUN_MAX))
    recent.add(1, row)
    assert recent.extend(1, row, 0) == RUN_MAX
    recent.reported(1, row[: RUN_MAX // 2])
    assert recent.extend(1, row, RUN_MAX // 2) == RUN_MAX


def test_rows_have_the_blocks_that_were_added_and_not_told_of_since() -> None:
    rng, clock = Random(5), Clock()
    recent, added, told = RecentBlocks(clock), dict[int, float](), set[int]()
    numbers = dict[tuple[int, ...], int]()
    prompts = list[list[int]]()

    def count(hashes: list[int]) -> int:
        return next((place for place, block in enumerate(hashes) if block not in told), len(hashes))

    for _ in range(20_000):
        clock.now_s += RECENT_S * rng.choice([0, 0, 0.03, 0.11])
        tokens = tuple(rng.choices(range(2), k=rng.randint(1, 9)))
        hashes = [numbers.setdefault(tokens[: end + 1], len(numbers)) for end in range(len(tokens))]
        prompts.append(hashes)
        known = rng.choice(prompts[-20:])
        match rng.randrange(4):
            case 0:
                recent.add(2, hashes, count(hashes))
                added |= dict.fromkeys(hashes[count(hashes) :], clock.now_s + RECENT_S)
            case 1:
                events = known[count(known) :][: rng.randint(1, 3)]
                recent.reported(2, events)
                told.update(events)
                for block in events:
                    added.pop(block, None)
            case 2:  # the end of a prompt is dropped, with all that follows it
                gone = known[-1]
                told -= {block for start, block in numbers.items() if numbers.get(start[: len(known)]) == gone}
            case _:
                found = count(hashes)
                while found < len(hashes) and added.get(hashes[found], 0) > clock.now_s:
                    found += 1
                assert recent.extend(2, hashes, count(hashes)) == found


def test_a_row_is_kept_for_a_moment_from_when_it_was_added_last() -> None:
    clock = Clock()
    recent = RecentBlocks(clock)
    for first in (1, 2, 3):
        recent.add(1, [first, 9])
    clock.now_s += RECENT_S / 2
    recent.add(1, [2])
    clock.now_s += RECENT_S / 2
    assert len(recent) == 1
    assert (recent.extend(1, [1, 9], 0), recent.extend(1, [2, 9], 0)) == (0, 1)
    clock.now_s += RECENT_S / 2
    assert recent.extend(1, [2], 0) == 0
    assert len(recent) == 0


def test_the_oldest_rows_go_first() -> None:
    recent = RecentBlocks(Clock())
    for number in range(RECENT_MAX + 2):
        recent.add(1, [number])
    assert len(recent) == RECENT_MAX
    assert [recent.extend(1, [number], 0) for number in (0, 1, 2, RECENT_MAX + 1)] == [0, 0, 1, 1]
