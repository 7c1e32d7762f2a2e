"""The garbage collector of a node: full collections are made while no request runs.

What an answered request leaves is freed at once, by reference counts. The collector is left what refers to itself, such
as the task of a connection that was closed, and a full collection examines everything that lives to find it: a third of
a second with a thousand streams, in which no token is sent. By Python's own rule there is one whenever a quarter of what
lives is new, so several follow each other when many clients come.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import trio

FULL_AFTER = 1000
"""Collections of the middle generation after which a full one is made though requests run, so that memory is bounded."""

WORTH = 10  # the same, while none runs
LOOK_INTERVAL_S = 1.0


def prepare() -> None:
    """Exclude the modules, which stay anyway, from all collections, and make full ones rare."""
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, FULL_AFTER)


def collections_since_full() -> int:
    """Return how many collections of the middle generation there were since the last full one."""
    return gc.get_count()[2]


async def collect_when_idle(
    running: Callable[[], int],
    since_full: Callable[[], int] = collections_since_full,
    collect: Callable[[], object] = gc.collect,
) -> None:
    """Make the full collections that are worth it whenever no request runs, for ever."""
    while True:
        await trio.sleep(LOOK_INTERVAL_S)
        if not running() and since_full() >= WORTH:
            collect()
