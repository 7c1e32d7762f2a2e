"""Full collections of garbage wait until no request runs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import trio
from trio.testing import MockClock

from supervisor.node.garbage import LOOK_INTERVAL_S, WORTH, YOUNGEST, collect_when_idle, collections_since_full


async def collected(running: Callable[[], int], since_full: Callable[[], int], duration_s: float) -> list[float]:
    """Return when full collections were made within a time."""
    times: list[float] = []
    with trio.move_on_after(duration_s):
        await collect_when_idle(running, since_full, lambda: times.append(trio.current_time()))
    return times


async def test_a_full_collection_waits_for_the_end_of_the_last_request(autojump_clock: MockClock) -> None:
    ended_at = trio.current_time() + 20.5
    times = await collected(lambda: int(trio.current_time() < ended_at), lambda: WORTH, 23.2)
    assert len(times) == 3
    assert ended_at < times[0] < ended_at + LOOK_INTERVAL_S


async def test_nothing_is_collected_while_there_is_little(autojump_clock: MockClock) -> None:
    assert await collected(lambda: 0, lambda: WORTH - 1, 60.0) == []


def test_collections_are_counted_until_a_full_one() -> None:
    gc.collect()
    assert collections_since_full() == 0
    gc.collect(1)
    gc.collect(1)
    assert collections_since_full() == WORTH
    gc.collect()
    assert collections_since_full() == 0


def test_a_node_freezes_its_modules_and_collects_rarely() -> None:
    program = (
        "import gc; from supervisor.node.garbage import prepare; prepare();"
        "print(gc.get_threshold()[0], gc.get_freeze_count())"
    )
    words = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    threshold, frozen = map(int, words)
    assert threshold == YOUNGEST
    assert frozen > 10_000
