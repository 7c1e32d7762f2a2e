"""Full collections of garbage wait until no request runs."""

from __future__ import annotations

from collections.abc import Callable

import trio

from supervisor.node.garbage import LOOK_INTERVAL_S, WORTH, collect_when_idle


async def collected(running: Callable[[], int], since_full: Callable[[], int], duration_s: float) -> list[float]:
    """Return when full collections were made within a time."""
    times: list[float] = []
    with trio.move_on_after(duration_s):
        await collect_when_idle(running, since_full, lambda: times.append(trio.current_time()))
    return times


async def test_a_full_collection_waits_for_the_end_of_the_last_request(autojump_clock: trio.testing.MockClock) -> None:
    ended_at = trio.current_time() + 20.5
    times = await collected(lambda: int(trio.current_time() < ended_at), lambda: WORTH, 23.2)
    assert len(times) == 3
    assert ended_at < times[0] < ended_at + LOOK_INTERVAL_S


async def test_nothing_is_collected_while_there_is_little(autojump_clock: trio.testing.MockClock) -> None:
    assert await collected(lambda: 0, lambda: WORTH - 1, 60.0) == []
