"""Blocks that are expected for a moment, before their worker tells of them."""

from __future__ import annotations

from attrs import define

from actors.routing.recent_blocks import RECENT_MAX, RECENT_S, RecentBlocks


@define
class Clock:
    now_s: float = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_blocks_follow_those_that_a_holder_has_told_of() -> None:
    recent = RecentBlocks(Clock())
    recent.add(4, [3, 4, 6])
    prompt = [1, 2, 3, 4, 5, 6]
    assert [recent.extend(4, prompt, count) for count in range(7)] == [0, 1, 4, 4, 4, 6, 6]
    assert recent.extend(8, prompt, 2) == 2


def test_a_block_is_kept_for_a_moment_from_when_it_was_added_last() -> None:
    clock = Clock()
    recent = RecentBlocks(clock)
    recent.add(1, [1, 2, 3])
    clock.now_s += RECENT_S / 2
    recent.add(1, [2])
    clock.now_s += RECENT_S / 2
    assert len(recent) == 1
    assert (recent.extend(1, [1, 2], 0), recent.extend(1, [2], 0)) == (0, 1)
    clock.now_s += RECENT_S / 2
    assert recent.extend(1, [2], 0) == 0
    assert len(recent) == 0


def test_the_oldest_blocks_go_first() -> None:
    recent = RecentBlocks(Clock())
    recent.add(1, range(RECENT_MAX + 2))
    assert len(recent) == RECENT_MAX
    assert [recent.extend(1, [number], 0) for number in (0, 1, 2, RECENT_MAX + 1)] == [0, 0, 1, 1]
