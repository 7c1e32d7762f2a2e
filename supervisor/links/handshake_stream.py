"""The bytes under a WebSocket: few of them until the other end has said who it is, and how they ended."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable

import trio
from attrs import define

# The start of Linux' tcp_info: unanswered probes of a closed window, segments not acknowledged, ms since the last ACK.
TCP_INFO = struct.Struct("=3xB20xI28xI")
STRANGER_BYTES_MAX = 32 * 1024  # of one that has not said yet who it is
STRANGER_READ_BYTES = 4 * 1024  # of those at a time: thousands of tiny frames would be looked at in one turn


@define(eq=False)
class LimitedStream(trio.abc.Stream):
    """A stream that lets a stranger say only so much."""

    stream: trio.abc.Stream
    on_end: Callable[[], None] | None = None
    end: str = ""
    too_much: bool = False
    _left: int | None = STRANGER_BYTES_MAX

    def trust(self) -> None:
        """Let the other end say as much as it likes."""
        self._left = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return some bytes, none at the end; raises `trio.BrokenResourceError` for too many."""
        if self._left is not None:
            max_bytes = min(max_bytes or STRANGER_READ_BYTES, STRANGER_READ_BYTES)
        try:
            data = await self.stream.receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            tls = cause.reason if isinstance(cause, ssl.SSLError) else None
            self._ended(f"TLS: {tls.lower().replace('_', ' ')}" if tls else "the connection broke")
            raise
        except trio.ClosedResourceError:
            self._ended("it does not speak WebSocket")  # the library has closed the stream, and says it to nobody
            raise
        if not data:
            self._ended("the other end closed the connection")
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self.too_much = True
                self._ended(f"more than {STRANGER_BYTES_MAX} bytes before it said who it is")
                raise trio.BrokenResourceError
        return data

    def _ended(self, how: str) -> None:
        self.end = self.end or how
        if self.on_end is not None:
            self.on_end()

    def acknowledged_s(self) -> float | None:
        """Return how long ago the other kernel last acknowledged anything, 0 if it owes nothing, None if unknown."""
        below = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        if not isinstance(below, trio.SocketStream):
            return None
        try:
            told = below.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
            probes, unacknowledged, since_ms = TCP_INFO.unpack(told)
        except (OSError, struct.error):  # no TCP, or a kernel that tells less
            return None
        return since_ms / 1000 if probes or unacknowledged else 0.0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`."""
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room to write."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the stream."""
        await self.stream.aclose()
