"""A client's socket: as few system calls and task switches a read as Trio allows, since they are most of its price."""

from __future__ import annotations

import socket
import ssl
from functools import cache
from typing import Protocol

import trio
from attrs import define

from bench.load.requests import Address

READ_BYTES_MAX = 16 * 1024  # tokens are small, and room for more than this is asked of the system at each read

_trust = cache(ssl.create_default_context)  # to read all certificates takes milliseconds, in which no token is read


class Wire(Protocol):
    """Bytes to and from a server. What the system says against it is raised as it is: `OSError` or Trio's own."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""

    async def receive(self) -> bytes:
        """Return what has come; empty at the end."""

    def waiting(self) -> bytes | None:
        """Return what has come already, empty at the end, None if there is nothing or nobody can tell."""

    def close(self) -> None:
        """Leave; a server that still sends sees the connection reset."""


@define(eq=False)
class Plain:
    """A TCP connection."""

    _socket: socket.socket  # never blocks

    async def send(self, data: bytes) -> None:
        """Send all of `data`; with a checkpoint only where the system's buffer is full."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    async def receive(self) -> bytes:
        """Return what has come; empty at the end."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(READ_BYTES_MAX)
            except BlockingIOError:
                continue

    def waiting(self) -> bytes | None:
        """Return what has come already."""
        try:
            return self._socket.recv(READ_BYTES_MAX)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Leave at once."""
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


@define(eq=False)
class Tls:
    """A TLS connection."""

    _stream: trio.SSLStream[trio.SocketStream]

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        """Return what has come; empty at the end."""
        return bytes(await self._stream.receive_some(READ_BYTES_MAX))

    def waiting(self) -> bytes | None:
        """Say nothing: TLS cannot be looked into without waiting."""
        return None

    def close(self) -> None:
        """Leave without a farewell."""
        self._stream.transport_stream.socket.close()


async def connect(where: Address) -> Wire:
    """Open a connection; raises what the system says against it."""
    stream = await trio.open_tcp_stream(where.host, where.port)
    if not where.tls:
        plain = socket.socket(fileno=stream.socket.detach())
        plain.setblocking(False)
        return Plain(plain)
    secure = trio.SSLStream(stream, _trust(), server_hostname=where.host, https_compatible=True)
    try:
        await secure.do_handshake()
    except BaseException:
        stream.socket.close()
        raise
    return Tls(secure)
