"""The garbage collector of a node: it runs rarely, and examines everything that lives only while no request runs.

The objects of an answered request are freed at once, by reference counts. The collector is left with cycles, such as
the task of a closed connection, and to find them a full collection examines all living objects: a third of a second
with a thousand streams, in which no token is sent. By Python's own rules a full one runs whenever a quarter of the
living objects are new, so several follow each other when many clients come. Small ones run for each 700 objects, about
one request: a tenth of its time was spent on them, in vain.
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
