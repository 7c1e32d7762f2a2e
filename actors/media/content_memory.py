"""The memory for the contents of one request, in which its items take turns.

All of it is taken from the shared budget at once, so that no two requests wait for each other's memory. It is at most
one owner's part of the budget, and all items together could be larger. So an item is opened when the largest content
that it may have fits beside the other contents. While no other item is being opened, it gets the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from protocol.errors import TooLarge

CONTENT_BYTES_MIN = 1024 * 1024  # the least bytes that a content counts, for its descriptor


def counted_bytes(size_bytes: int) -> int:
    """Return the bytes that a content of a size counts."""
    return max(size_bytes, CONTENT_BYTES_MIN)


@define(eq=False)
class ContentMemory:
    """The memory of one request, of `bytes_max`: `held_bytes` by opened contents, the rest promised or free."""

    bytes_max: int
    held_bytes: int = 0
    _promised: int = 0
    _turn: trio.Lock = field(factory=trio.Lock)  # held by the item whose turn is next
    _changed: trio.Event = field(factory=trio.Event)

    @asynccontextmanager
    async def opening(self, bytes_max: int) -> AsyncIterator[int]:
        """Wait for room for a content, promise it that room while the body opens it, and yield its size.

        The size is `bytes_max`, or the rest of the memory if the rest is less. Raises `TooLarge` if there is no rest.
        """
        wanted = counted_bytes(bytes_max)
        async with self._turn:
            while self._promised and wanted > self.bytes_max - self.held_bytes - self._promised:
                self._changed = trio.Event()
                await self._changed.wait()
            promised = min(wanted, self.bytes_max - self.held_bytes)
            if promised < CONTENT_BYTES_MIN:
                raise self.too_large()
            self._promised += promised
        try:
            yield promised
        finally:
            self._promised -= promised
            self._changed.set()

    def add(self, size_bytes: int) -> None:
        """Count an opened content; raises `TooLarge` for more than the request may have."""
        self.held_bytes += counted_bytes(size_bytes)
        if self.held_bytes > self.bytes_max:
            raise self.too_large()

    def too_large(self) -> TooLarge:
        """Return the error for contents larger together than the memory."""
        most = f"{self.bytes_max:,} bytes together, and each counts {CONTENT_BYTES_MIN:,} at least"
        return TooLarge(f"the images and videos of one request can have {most}")
