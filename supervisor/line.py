"""The bytes under a WebSocket: few of them until the other end has said who it is, and how they ended."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import trio
from attrs import define

STRANGER_BYTES_MAX = 32 * 1024  # of one that has not said yet who it is


@define(eq=False)
class Line(trio.abc.Stream):
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

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`."""
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room to write."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the stream."""
        await self.stream.aclose()
