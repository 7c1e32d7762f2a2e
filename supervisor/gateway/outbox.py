"""The only way to write to a client's socket: at once as far as the socket takes it, the rest from a bounded backlog.

Tokens of many clients come in one turn of the event loop, and none of them may wait for a client that does not read. So
`put` never waits: it writes to the socket directly, and the rest goes into the client's backlog, which one task drains.
A client with a full backlog, or without any progress for a while, is dropped. Frames, pongs, close frames and HTTP
bodies all enter whole and synchronously, so nothing is written into the middle of something else. TLS has no send that
does not block; there everything goes through the backlog.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import trio
from attrs import define, field, frozen

from protocol.errors import SlowClient
from supervisor.gateway.memory_budgets import UNBOUNDED, Backlogs

READ_BYTES = 64 * 1024
FRAMES_A_WRITE = 64  # of one `writev`
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: close at once, with a reset
TLS_BYTES_A_WRITE = 16 * 1024  # the longest record: a client that cannot take one in `stall_s` does not read


@frozen
class OutboxStatistics:
    """The backlog of one client, and the fate of all accepted bytes: sent, lost or waiting."""

    backlog_bytes: int
    backlog_frames: int
    begun_frames: int  # of those; the socket may have part of them, so they must go out whole
    sent_bytes: int
    lost_bytes: int


@define(eq=False)
class Outbox(trio.abc.AsyncResource):
    """A client's socket and its backlog: `put` writes or appends, `run` drains."""

    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]
    backlog_bytes_max: int
    stall_s: float
    all_backlogs: Backlogs = field(factory=lambda: Backlogs(lambda: UNBOUNDED))
    backlog_bytes: int = 0
    accepted_bytes: int = 0  # of all calls of `put` that did not raise
    client_gone: bool = False
    closed_here: bool = False  # this server closed it, not the client
    drop_reason: str | None = None  # "backlog" or "stalled", once the client was too slow; "silent": it is gone
    on_backlog: Callable[[], None] | None = None  # called once, with the first backlog: many clients never have one
    lost_bytes: int = 0  # that were accepted and will never be sent
    _socket: trio.socket.SocketType | None = field(init=False)  # to write to at once; None under TLS
    _closed: bool = False
    _lost_frames: bool = False  # the connection ended with a backlog
    _frames: list[bytes | memoryview] = field(factory=list)  # the backlog; part of the first one may have been sent
    _begun_frames: int = 1  # the number of first frames that must go out whole: the socket may have part of them
    _callbacks: list[tuple[int, Callable[[bool], None]]] = field(factory=list)  # with the bytes that each waits for
    _more: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _flushed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _progress: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self._socket = None if isinstance(self.stream, trio.SSLStream) else self.stream.socket

    def put(self, data: bytes) -> None:
        """Write `data`, now or later, whole and in order.

        Raises `SlowClient` if the backlog has no room for it, `trio.BrokenResourceError` if the client is gone. Without
        a backlog data of any size is accepted: the client has not been slow yet, and part of it has been written.
        """
        if self.client_gone:
            raise trio.BrokenResourceError("the client is gone")
        if self._frames:
            more, own = len(data), self.backlog_bytes
            if own + more > self.backlog_bytes_max or not self.all_backlogs.allows(own, more):
                self.drop_reason = "backlog"
                raise SlowClient(f"{self.backlog_bytes} bytes wait for the client to read")
            self._append(data)
        elif (taken := self._write(data)) < len(data):
            self._append(data[taken:])
        self.accepted_bytes += len(data)

    @property
    def sent_bytes(self) -> int:
        """The accepted bytes that the socket has taken."""
        return self.accepted_bytes - self.backlog_bytes - self.lost_bytes

    def statistics(self) -> OutboxStatistics:
        """Return the backlog, and the bytes that were sent or lost."""
        backlog_bytes, frames = sum(map(len, self._frames)), len(self._frames)
        return OutboxStatistics(
            backlog_bytes, frames, min(self._begun_frames, frames), self.sent_bytes, self.lost_bytes
        )

    def on_sent(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(True)` once the socket has taken all that was put so far, `callback(False)` if it cannot."""
        if self._frames:
            self._callbacks.append((self.accepted_bytes, callback))
        else:
            callback(not self.lost_bytes)

    def put_last(self, data: bytes) -> None:
        """Write the last bytes of this connection, in place of every frame that the socket has nothing of yet."""
        if not self.client_gone:
            del self._frames[self._begun_frames :]
            kept_bytes = sum(map(len, self._frames))
            self.lost_bytes += self.backlog_bytes - kept_bytes
            self._resize(kept_bytes)
            self._call_back(whole=False)
            taken = 0 if self._frames else self._write(data)
            if taken < len(data):
                self._append(data[taken:])
            self.accepted_bytes += len(data)

    async def run(self) -> None:
        """Drain the backlog until the outbox closes; raises `SlowClient` if the client reads nothing for `stall_s`."""
        try:
            while not self._closed:
                while self._frames:
                    if isinstance(self.stream, trio.SSLStream):
                        await self._send_some(self.stream)
                    else:
                        await self._wait(self.stream)
                        self._drain()
                self._flushed.unpark_all()
                await self._more.park()
        except trio.ClosedResourceError:
            pass

    async def wait_room(self, size: int) -> None:
        """Wait until the backlog is empty, or half of it has room for `size` bytes, or the client is gone.

        A long response is written piece by piece with this wait between them, so that it does not fill the backlog.
        """
        await trio.lowlevel.checkpoint()
        while self._frames and not self.client_gone and self.backlog_bytes + size > self.backlog_bytes_max // 2:
            await self._progress.park()

    async def wait_flushed(self) -> None:
        """Wait until the backlog is empty or the client is gone."""
        await trio.lowlevel.checkpoint()
        while self._frames and not self.client_gone:
            await self._flushed.park()

    async def linger(self) -> None:
        """Shut down the sending side, and read until the client closes its own.

        Closing a socket with unread input resets the connection, and destroys everything that the client has not read.
        """
        stream = self.stream
        # TLS ends as if closed: heads and frames show whether a message is whole.
        if isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_eof()
            while await stream.receive_some(READ_BYTES):
                pass

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return the next bytes from the client, none at the end."""
        return await self.stream.receive_some(max_bytes or READ_BYTES)

    def close(self) -> bool:
        """Close the socket unless that needs a wait, as an orderly end of TLS does; return whether it is closed.

        If a backlog is lost by that, the connection is reset: after an orderly end, a body without a length (HTTP/1.0)
        would look complete.
        """
        self._closed, self.closed_here = True, self.closed_here or not self.client_gone
        lost = bool(self._frames) or self._lost_frames
        self._discard()
        stream = self.stream
        if isinstance(stream, trio.SSLStream):
            if not lost:
                return False
            stream = stream.transport_stream
        if lost and stream.socket.fileno() >= 0:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        stream.socket.close()
        return True

    async def aclose(self) -> None:
        """Close the socket, under TLS with its orderly end."""
        self.close()
        await self.stream.aclose()

    # ------------------------------------------------------------------------------------

    def _append(self, data: bytes) -> None:
        self._frames.append(data)
        self._resize(self.backlog_bytes + len(data))
        self._more.unpark()
        if self.on_backlog is not None:
            callback, self.on_backlog = self.on_backlog, None
            callback()

    def _resize(self, size: int) -> None:
        shared, before = self.all_backlogs, self.backlog_bytes
        shared.size_bytes += size - before
        shared.count += bool(size) - bool(before)
        self.backlog_bytes = size

    def _discard(self) -> None:
        self.client_gone = True
        self._lost_frames = self._lost_frames or bool(self._frames)
        self._frames.clear()
        self.lost_bytes += self.backlog_bytes
        self._resize(0)
        self._call_back(whole=False)
        self._flushed.unpark_all()
        self._progress.unpark_all()
        self._more.unpark_all()

    def _write(self, data: bytes) -> int:
        """Return how much of `data` the socket has taken without waiting."""
        if (client := self._socket) is None:
            return 0
        try:
            return os.write(client.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._discard()
            raise trio.BrokenResourceError("the client is gone") from error

    async def _wait(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(self.stall_s) as deadline:
            await trio.lowlevel.wait_writable(stream.socket)
        if deadline.cancelled_caught:
            self._drop_stalled()

    async def _send_some(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        """Send some first frames, or a piece of one; they are taken off the backlog once the socket has them."""
        self._begun_frames, size = 1, len(self._frames[0])
        while (
            self._begun_frames < len(self._frames) and size + len(self._frames[self._begun_frames]) <= TLS_BYTES_A_WRITE
        ):
            size += len(self._frames[self._begun_frames])
            self._begun_frames += 1
        data = b"".join((self._frames[0][:TLS_BYTES_A_WRITE], *self._frames[1 : self._begun_frames]))
        try:
            with trio.move_on_after(self.stall_s) as deadline:
                await stream.send_all(data)
        except trio.BrokenResourceError:
            # The reader of this socket sees its end, too.
            self._discard()
            return
        if deadline.cancelled_caught:
            self._drop_stalled()
        self._taken(len(data))

    def _drop_stalled(self) -> NoReturn:
        self.drop_reason = "stalled"
        self._discard()
        raise SlowClient(f"the client has read nothing for {self.stall_s} s")

    def _drain(self) -> None:
        """Write as much of the backlog as the socket takes without waiting."""
        assert isinstance(self.stream, trio.SocketStream)
        try:
            taken = os.writev(self.stream.socket.fileno(), self._frames[:FRAMES_A_WRITE])
        except BlockingIOError:
            return
        except OSError:
            # The reader of this socket sees its end, too.
            self._discard()
            return
        self._taken(taken)

    def _taken(self, taken: int) -> None:
        """Take `taken` bytes off the backlog."""
        # The outbox was closed during the write.
        if not self._frames:
            return
        self._resize(self.backlog_bytes - taken)
        whole = 0
        while whole < len(self._frames) and taken >= len(self._frames[whole]):
            taken -= len(self._frames[whole])
            whole += 1
        del self._frames[:whole]
        if taken:
            self._frames[0] = _rest(self._frames[0], taken)
        self._begun_frames = 1
        self._progress.unpark_all()
        if self._callbacks:
            self._call_back(whole=True)

    def _call_back(self, *, whole: bool) -> None:
        """Call the callbacks whose bytes have been sent; if no more will be (not `whole`), all of them."""
        sent_bytes = self.sent_bytes
        while self._callbacks and (not whole or self._callbacks[0][0] <= sent_bytes):
            awaited_bytes, callback = self._callbacks.pop(0)
            callback(awaited_bytes <= sent_bytes)


def _rest(frame: bytes | memoryview, taken: int) -> bytes | memoryview:
    """Return what is left of a frame: a view of it until half of it is gone, then a copy.

    A copy at each write takes a time that grows with the square of the frame; a view keeps the memory of all of it.
    """
    left = memoryview(frame)[taken:]
    return left if 2 * len(left) > memoryview(left.obj).nbytes else bytes(left)
