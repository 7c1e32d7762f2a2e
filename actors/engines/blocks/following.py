"""Following the log of an engine's blocks, by Trio tasks of the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from actors.engines.blocks.block_log import BlockLog, BlockReader
from protocol.errors import EngineLost
from protocol.messages.kv_events import BlockEvents


@contextmanager
def changes_of(log: BlockLog) -> Iterator[trio.lowlevel.ParkingLot]:
    """Return where to wait for the next change of a log."""
    changed = trio.lowlevel.ParkingLot()

    def wake() -> None:
        changed.unpark_all()

    log.listeners.add(wake)
    try:
        yield changed
    finally:
        log.listeners.discard(wake)


async def follow_blocks(log: BlockLog, receive: Callable[[BlockEvents], None], lost: trio.Event) -> None:
    """Pass on all blocks of a log, and then each change, until `lost`, which is notified; raises `EngineLost` then."""
    reader = BlockReader(log)
    with changes_of(log) as changed:
        while not lost.is_set():
            if (events := reader.read()) is None:
                await changed.park()
            else:
                receive(events)
                await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()
    raise EngineLost("the engine has ended")
