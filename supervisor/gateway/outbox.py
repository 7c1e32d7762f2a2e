"""The only way to write to a client's socket: at once if the socket takes it, else behind the client's own backlog.

Frames enter whole, from whoever has one, synchronously; pongs, closes and HTTP bodies go the same way, so nothing is
written into the middle of something else. A slow client delays nobody: its backlog grows until it is full, and then it
is dropped. TLS has no send that does not block, so there everything goes behind the backlog, and its task sends.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import trio
from attrs import define, field

from protocol.errors import SlowClient

READ_BYTES = 64 * 1024
FRAMES_A_WRITE = 64
UNBOUNDED = 2**63  # for a client that shares with no other
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, and tell the other end
TLS_BYTES_A_WRITE = 16 * 1024  # the longest record: a client that cannot take one in `stall_s` does not read


@define(eq=False)
class Backlogs:
    """What all clients have not read yet: beyond half of `bytes_max` each may have its share of the other half."""

    bytes_max: Callable[[], int]
    size_bytes: int = 0
    count: int = 0  # of clients that have a backlog

    def allows(self, own: int, more: int) -> bool:
        """Whether a client that has so much may have so much more."""
        half = self.bytes_max() // 2
        return self.size_bytes + more <= half or own + more <= half // max(1, self.count)


@define(eq=False)
class Outbox(trio.abc.Stream):
    """A client's socket; bytes go in by `put`, and `run` drains what the socket would not take at once."""

    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]
    backlog_bytes_max: int
    stall_s: float
    all_backlogs: Backlogs = field(factory=lambda: Backlogs(lambda: UNBOUNDED))
    backlog_bytes: int = 0
    accepted_bytes: int = 0  # in all; what is not in the backlog has been sent
    gone: bool = False
    let_go: bool = False  # it was closed from here while its client was there
    dropped: str | None = None  # why the client was too slow, once it was
    on_backlog: Callable[[], None] | None = None  # called once, with the first backlog: many clients never have one
    lost_bytes: int = 0  # that were put in and never left
    _closed: bool = False
    _torn: bool = False  # it was lost with a backlog
    _rest: list[bytes] = field(factory=list)  # whole frames; the socket may have taken part of the first `_begun`
    _begun: int = 1
    _receipts: deque[tuple[int, Callable[[bool], None]]] = field(factory=deque)  # who hears that so much has left
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _flushed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _progress: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def put(self, data: bytes) -> None:
        """Write `data`, now or later, whole and in order.

        Raises `SlowClient` if the backlog has no room for it, `trio.BrokenResourceError` if the client is gone. What
        meets no backlog is taken whatever its size: nobody has been slow yet, and half of it may be on its way.
        """
        if self.gone:
            raise trio.BrokenResourceError("the client is gone")
        if self._rest:
            more, own = len(data), self.backlog_bytes
            if own + more > self.backlog_bytes_max or not self.all_backlogs.allows(own, more):
                self.dropped = "backlog"
                raise SlowClient(f"{self.backlog_bytes} bytes wait for the client to read")
            self._park(data)
        elif rest := data[self._write(data) :]:
            self._park(rest)
        self.accepted_bytes += len(data)

    @property
    def sent_bytes(self) -> int:
        """How much of all that was put in has left."""
        return self.accepted_bytes - self.backlog_bytes - self.lost_bytes

    def on_sent(self, tell: Callable[[bool], None]) -> None:
        """Call `tell(True)` once the socket has taken all that was put in so far, or `tell(False)` once it cannot."""
        if self._rest:
            self._receipts.append((self.accepted_bytes, tell))
        else:
            tell(not self.lost_bytes)

    def put_last(self, data: bytes) -> None:
        """Write the last thing that this client will hear, in place of everything that it has not begun to get."""
        if not self.gone:
            del self._rest[self._begun :]
            kept_bytes = sum(map(len, self._rest))
            self.lost_bytes += self.backlog_bytes - kept_bytes
            self._resize(kept_bytes)
            self._tell_receipts(whole=False)
            self.accepted_bytes += len(data)
            if self._rest or (data := data[self._write(data) :]):
                self._park(data)

    async def run(self) -> None:
        """Drain the backlog until the end; raises `SlowClient` if the client reads nothing for `stall_s`."""
        try:
            while not self._closed:
                while self._rest:
                    if isinstance(self.stream, trio.SSLStream):
                        await self._send_some(self.stream)
                    else:
                        await self._wait(self.stream)
                        self._drain()
                self._flushed.unpark_all()
                await self._news.park()
        except trio.ClosedResourceError:
            pass

    async def wait_room(self, size: int) -> None:
        """Wait until the backlog has room for so many bytes and is half empty, or is empty, or the client is gone.

        Whoever writes what is long waits here, so that it meets a full backlog only where others write, too.
        """
        await trio.lowlevel.checkpoint()
        while self._rest and not self.gone and self.backlog_bytes + size > self.backlog_bytes_max // 2:
            await self._progress.park()

    async def wait_flushed(self) -> None:
        """Wait until nothing waits for the socket any more, or the client is gone."""
        await trio.lowlevel.checkpoint()
        while self._rest and not self.gone:
            await self._flushed.park()

    async def linger(self) -> None:
        """Say that nothing follows, and wait until the client has no more to say either.

        To close a socket on what has not been read destroys what the client has not read yet.
        """
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if isinstance(self.stream, trio.SocketStream):  # with TLS the head and the frames have said so
                await self.stream.send_eof()
            while await self.stream.receive_some(READ_BYTES):
                pass

    # What trio-websocket, as the user of a stream, calls ------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` through the outbox."""
        await trio.lowlevel.checkpoint()
        try:
            self.put(bytes(data))
        except SlowClient as error:
            raise trio.BrokenResourceError(str(error)) from error

    async def wait_send_all_might_not_block(self) -> None:
        """Wait for the backlog to empty."""
        await self.wait_flushed()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Read from the client."""
        return await self.stream.receive_some(max_bytes or READ_BYTES)

    def close(self) -> bool:
        """Close the socket without a word, if that takes no time; return whether it is closed.

        What has not left is lost then, and the client is told by a reset: an orderly end would make a body whole that
        ends where its connection does (HTTP/1.0).
        """
        self._closed, self.let_go = True, self.let_go or not self.gone
        torn = bool(self._rest) or self._torn
        self._lost()
        stream = self.stream
        if isinstance(stream, trio.SSLStream):
            if not torn:
                return False
            stream = stream.transport_stream
        if torn and stream.socket.fileno() >= 0:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        stream.socket.close()
        return True

    async def aclose(self) -> None:
        """Close the socket."""
        self.close()
        await self.stream.aclose()

    # ------------------------------------------------------------------------------------

    def _park(self, data: bytes) -> None:
        self._rest.append(data)
        self._resize(self.backlog_bytes + len(data))
        self._news.unpark()
        if self.on_backlog is not None:
            begin, self.on_backlog = self.on_backlog, None
            begin()

    def _resize(self, size: int) -> None:
        of, before = self.all_backlogs, self.backlog_bytes
        of.size_bytes += size - before
        of.count += bool(size) - bool(before)
        self.backlog_bytes = size

    def _lost(self) -> None:
        self.gone = True
        self._torn = self._torn or bool(self._rest)
        self._rest.clear()
        self.lost_bytes += self.backlog_bytes
        self._resize(0)
        self._tell_receipts(whole=False)
        self._flushed.unpark_all()
        self._progress.unpark_all()
        self._news.unpark_all()

    def _write(self, data: bytes) -> int:
        """Give the socket as much as it takes without waiting."""
        if isinstance(self.stream, trio.SSLStream):
            return 0
        try:
            return os.write(self.stream.socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lost()
            raise trio.BrokenResourceError("the client is gone") from error

    async def _wait(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(self.stall_s) as patience:
            await trio.lowlevel.wait_writable(stream.socket)
        if patience.cancelled_caught:
            self._stalled()

    async def _send_some(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        """Send the first frames, or a piece of the first one; they stay in the backlog until the socket has them."""
        self._begun, size = 1, len(self._rest[0])
        while self._begun < len(self._rest) and size + len(self._rest[self._begun]) <= TLS_BYTES_A_WRITE:
            size += len(self._rest[self._begun])
            self._begun += 1
        data = b"".join(self._rest[: self._begun])[:TLS_BYTES_A_WRITE]
        try:
            with trio.move_on_after(self.stall_s) as patience:
                await stream.send_all(data)
        except trio.BrokenResourceError:  # its reader sees the end too, and says so
            self._lost()
            return
        if patience.cancelled_caught:
            self._stalled()
        self._taken(len(data))

    def _stalled(self) -> None:
        self.dropped = "stalled"
        self._lost()
        raise SlowClient(f"the client has read nothing for {self.stall_s} s")

    def _drain(self) -> None:
        """Give the socket what it takes of the backlog."""
        assert isinstance(self.stream, trio.SocketStream)
        try:
            taken = os.writev(self.stream.socket.fileno(), self._rest[:FRAMES_A_WRITE])
        except BlockingIOError:
            return
        except OSError:  # its reader sees the end too, and says so
            self._lost()
            return
        self._taken(taken)

    def _taken(self, taken: int) -> None:
        """Keep what is left of the backlog in whole frames, but for the first."""
        if not self._rest:  # it was closed while it was being sent
            return
        self._resize(self.backlog_bytes - taken)
        whole = 0
        while whole < len(self._rest) and taken >= len(self._rest[whole]):
            taken -= len(self._rest[whole])
            whole += 1
        del self._rest[:whole]
        if taken:
            self._rest[0] = self._rest[0][taken:]
        self._begun = 1
        self._progress.unpark_all()
        if self._receipts:
            self._tell_receipts(whole=True)

    def _tell_receipts(self, *, whole: bool) -> None:
        """Tell those for whom all has left, or, once the rest cannot, everybody."""
        sent = self.sent_bytes
        while self._receipts and (not whole or self._receipts[0][0] <= sent):
            at, tell = self._receipts.popleft()
            tell(at <= sent)


def text_frame(payload: bytes) -> bytes:
    """Return a whole, unmasked WebSocket text frame, as a server sends it (RFC 6455, section 5.2)."""
    size = len(payload)
    if size < 126:
        return bytes((0x81, size)) + payload
    if size < 65_536:
        return struct.pack(">BBH", 0x81, 126, size) + payload
    return struct.pack(">BBQ", 0x81, 127, size) + payload


def close_frame(code: int, reason: str) -> bytes:
    """Return a whole WebSocket close frame (RFC 6455, section 5.5.1); `reason` is cut to what one may hold."""
    payload = struct.pack(">H", code) + reason.encode()[:123].decode(errors="ignore").encode()
    return bytes((0x88, len(payload))) + payload
