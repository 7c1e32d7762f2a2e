"""Transports of links: what a link needs of whatever carries its bytes, and the stream socket that often does."""

from __future__ import annotations

from typing import Protocol

import trio
from attrs import define

READ_BYTES = 256 * 1024


class Transport(Protocol):
    """Bytes, whole and in order; raises `trio.BrokenResourceError` or returns nothing once the other end is gone."""

    async def send_all(self, data: bytes) -> None:
        """Write all of `data`."""

    async def receive_some(self) -> bytes | bytearray:
        """Return some bytes, none at the end."""


@define(eq=False)
class SocketTransport:
    """A stream socket: to an engine host, or to an operator's command on the same machine."""

    stream: trio.SocketStream

    async def send_all(self, data: bytes) -> None:
        """Write all of `data`."""
        await self.stream.send_all(data)

    async def receive_some(self) -> bytes | bytearray:
        """Return some bytes, none at the end."""
        return await self.stream.receive_some(READ_BYTES)
