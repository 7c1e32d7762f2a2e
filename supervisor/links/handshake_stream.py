"""The byte stream under a WebSocket: limited until the other end has proved its name, and with the reason of its end.

Strangers can connect to a node. Until the greeting has proved its name, an end may send few bytes, which are read in
small pieces: thousands of connections cost neither memory nor a long turn of the event loop.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable

import trio
from attrs import define, field

# The start of Linux' tcp_info: unanswered probes of a closed window, segments not acknowledged, ms since the last ACK.
TCP_INFO = struct.Struct("=3xB20xI28xI")
HANDSHAKE_BYTES_MAX = 32 * 1024
HANDSHAKE_READ_BYTES = 4 * 1024  # a larger read could hold thousands of tiny WebSocket frames


@define(eq=False)
class LimitedStream(trio.abc.Stream):
    """A stream with a limit of received bytes until `lift_limit` is called."""

    stream: trio.abc.Stream
    on_end: Callable[[], None] | None = None
    end_reason: str = ""  # how receiving ended, in words
    limit_exceeded: bool = False
    _remaining: int | None = HANDSHAKE_BYTES_MAX
    _sending: trio.StrictFIFOLock = field(factory=trio.StrictFIFOLock, init=False)

    def lift_limit(self) -> None:
        """Remove the limit of received bytes."""
        self._remaining = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return some bytes, none at the end; raises `trio.BrokenResourceError` beyond the limit."""
        if self._remaining is not None:
            max_bytes = min(max_bytes or HANDSHAKE_READ_BYTES, HANDSHAKE_READ_BYTES)
        try:
            data = await self.stream.receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            tls = cause.reason if isinstance(cause, ssl.SSLError) else None
            self._end(f"TLS: {tls.lower().replace('_', ' ')}" if tls else "the connection broke")
            raise
        except trio.ClosedResourceError:
            self._end("it does not speak WebSocket")  # the library has closed the stream without an error
            raise
        if not data:
            self._end("the other end closed the connection")
        if self._remaining is not None:
            self._remaining -= len(data)
            if self._remaining < 0:
                self.limit_exceeded = True
                self._end(f"more than {HANDSHAKE_BYTES_MAX} bytes before it said who it is")
                raise trio.BrokenResourceError
        return data

    def _end(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason
        if self.on_end is not None:
            self.on_end()

    def acknowledged_s(self) -> float | None:
        """Return the seconds since the last acknowledgement of the other kernel: 0 if none is due, None if unknown."""
        tcp = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        if not isinstance(tcp, trio.SocketStream):
            return None
        try:
            info = tcp.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
            probes, unacknowledged, since_ms = TCP_INFO.unpack(info)
        except (OSError, struct.error):  # no TCP, or a kernel whose tcp_info is shorter
            return None
        return since_ms / 1000 if probes or unacknowledged else 0.0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`, behind what other tasks write: pongs come from the WebSocket's reader."""
        try:
            self._sending.acquire_nowait()  # a free lock takes no turn of the event loop
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self.stream.send_all(data)
        finally:
            self._sending.release()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room to write."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the stream."""
        await self.stream.aclose()
