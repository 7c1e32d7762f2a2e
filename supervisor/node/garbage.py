"""The garbage collector of a node: it runs rarely, and examines everything that lives only while no request runs.

What an answered request leaves is freed at once, by reference counts. The collector is left what refers to itself, such
as the task of a connection that was closed, and to find it a full collection examines everything that lives: a third of
a second with a thousand streams, in which no token is sent. By Python's own rules a full one is made whenever a quarter
of what lives is new, so several follow each other when many clients come; and small ones are made for each 700 objects,
which is what one request consists of, so that a tenth of its time went to looking for garbage that was not there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import trio

YOUNGEST = 5000  # new objects, less those that were freed, between two collections of these alone
MIDDLE = 5  # of those collections between two that examine the objects which survived one, too: some 50 ms at most
FULL_AFTER = 100  # such collections; then a full one is made though requests run, so that memory is bounded
WORTH = 2  # the same, while none runs
LOOK_INTERVAL_S = 1.0


def prepare() -> None:
    """Exclude the modules, which stay anyway, from all collections, and make these rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, MIDDLE, FULL_AFTER)


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
