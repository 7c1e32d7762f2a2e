"""Transports of links: the interface that a link needs, and its implementation by a stream socket."""

from __future__ import annotations

import os
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
        """Return some bytes, none at the end; raises `trio.BrokenResourceError` if the other end has reset the socket.

        An engine sends one message a step, and nothing more has arrived when the next message is awaited. So the socket
        is read only once it is readable: `receive_some` of the stream would first try in vain each time.
        """
        client = self.stream.socket
        while True:
            if client.fileno() < 0:
                raise trio.ClosedResourceError("the socket was closed here")
            await trio.lowlevel.wait_readable(client)
            try:
                return os.read(client.fileno(), READ_BYTES)
            except BlockingIOError:
                pass
            except OSError as error:
                raise trio.BrokenResourceError(f"the socket broke: {error}") from error
