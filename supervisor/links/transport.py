"""What a link needs of whatever carries its bytes."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """Bytes, whole and in order; raises `trio.BrokenResourceError` or returns nothing once the other end is gone."""

    async def send_all(self, data: bytes) -> None:
        """Write all of `data`."""

    async def receive_some(self) -> bytes | bytearray:
        """Return some bytes, none at the end."""
