"""Turns of the event loop, so that clients with much work do not delay the tokens of all others."""

from __future__ import annotations

import trio
from attrs import field, frozen

LONG_BODIES_A_TURN = 4  # of which a piece is read in one pass of the event loop
ENDING_A_TURN = 4  # connections that may end in one turn: hundreds that end together must not delay other tokens


@frozen(eq=False)
class LoopTurns:
    """Turns for the reading of requests, and for the ends of connections."""

    reading: trio.Semaphore = field(factory=lambda: trio.Semaphore(1))  # held while many small pieces are read
    reading_bodies: trio.Semaphore = field(factory=lambda: trio.Semaphore(LONG_BODIES_A_TURN))
    ending: trio.Semaphore = field(factory=lambda: trio.Semaphore(ENDING_A_TURN))

    async def wait_read(self) -> None:
        """Wait for a turn in which no other client's many small pieces are read.

        However many clients send small pieces, the tokens of all others wait for one of those clients at a time.
        """
        async with self.reading:
            await trio.lowlevel.checkpoint()

    async def wait_body(self) -> None:
        """Wait for a turn in which the next piece of a long body may be read.

        However many clients send images, the tokens of all others wait for a few of those clients at a time.
        """
        async with self.reading_bodies:
            await trio.lowlevel.checkpoint()

    async def wait_end(self) -> None:
        """Wait for a turn in which one more connection may end."""
        async with self.ending:
            pass
