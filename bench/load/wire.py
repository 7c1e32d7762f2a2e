"""A client's socket, with as few system calls and task switches a read as Trio allows, which are most of its cost."""

from __future__ import annotations

import socket

import trio
from attrs import define

from bench.load.requests import Address

READ_BYTES_MAX = 16 * 1024  # tokens are small, and each read allocates as much


@define(eq=False)
class Wire:
    """A TCP connection. Errors of the system are raised unchanged: `OSError` or Trio's own."""

    _socket: socket.socket  # never blocks

    async def send(self, data: bytes) -> None:
        """Send all of `data`; a checkpoint only when the system's buffer is full."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    async def receive(self) -> bytes:
        """Wait for bytes and return them; empty at the end."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(READ_BYTES_MAX)
            except BlockingIOError:
                continue

    def waiting(self) -> bytes | None:
        """Return the bytes that wait, empty at the end, None if there are none."""
        try:
            return self._socket.recv(READ_BYTES_MAX)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Close at once; a server that still sends gets a reset."""
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


async def connect(where: Address) -> Wire:
    """Open a connection; raises the system's error if it cannot."""
    stream = await trio.open_tcp_stream(where.host, where.port)
    plain = socket.socket(fileno=stream.socket.detach())
    plain.setblocking(False)
    return Wire(plain)
