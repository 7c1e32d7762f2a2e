"""The stream between a client's socket and the WebSocket library: a handshake that was read before, and what follows.

The library parses all bytes that it reads in one turn, and stores every message until it is taken. So this stream gives
it a few frames in a turn of the event loop, takes turns with other clients that send many, and reserves memory for
messages as they come.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, field

from protocol.errors import Overloaded
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.websocket.frame_counter import FrameCounter
from supervisor.gateway.websocket.frames import TRY_AGAIN, close_frame

CLOSE = b"\x88"  # the first byte of a close frame
FRAMES_A_TURN = 64  # of one client: a frame may be empty
FRAMES_FREE = 4  # that are read without waiting for other clients that send many


@define(eq=False)
class ReplayedStream(trio.abc.HalfCloseableStream):
    """A stream whose first bytes have been read already: the handshake, and what the client sent right behind it.

    Closing it ends reading and writing; the socket itself is closed by the server, after the client has had time to
    read.
    """

    outbox: Outbox
    handshake: bytes
    _unread: bytes | bytearray  # received, and not given to the library yet
    memory: MemoryReservation  # for messages that have been received, in part or as a whole, and not been taken
    wait_read_turn: Callable[[], Awaitable[None]]  # called before many frames are read
    accepted: trio.Event = field(factory=trio.Event)  # before it, the library would drop what follows the handshake
    closed: bool = False
    close_sent: bool = False  # a close frame of ours, after which nothing may follow
    received_at: float = 0.0  # when the last byte came, of a ping for example
    ended: bool = False  # nothing more comes
    _frames: FrameCounter = field(factory=FrameCounter)
    _while_open: trio.CancelScope | None = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return the handshake, then what follows it, a few frames at a time."""
        if self.handshake:
            await trio.lowlevel.checkpoint()
            handshake, self.handshake = self.handshake, b""
            return handshake
        await self.accepted.wait()
        self._check_open()
        if not self._unread:
            self._unread = await self._receive(max_bytes)
        size, frames = self._frames.feed(self._unread[:max_bytes], FRAMES_A_TURN)
        data, self._unread = self._unread[:size], self._unread[size:]
        self._reserve()
        if frames > FRAMES_FREE:
            await self.wait_read_turn()
        return data

    async def _receive(self, max_bytes: int | None) -> bytes | bytearray:
        try:
            data = await self.outbox.receive_some(max_bytes)
        except trio.BrokenResourceError:
            self._end()
            raise
        if not data:
            self._end()
        self.received_at = trio.current_time()
        return data

    def _reserve(self) -> None:
        """Reserve memory for the received parts of messages, or close with 1013 if there is none."""
        try:
            self.memory.grow(self._frames.kept_bytes - self.memory.size_bytes)
        except Overloaded as error:
            self.close_sent = True
            self.outbox.put_last(close_frame(TRY_AGAIN, error.detail))
            raise trio.BrokenResourceError(error.detail) from error

    def message_taken(self) -> None:
        """Give back the memory of the oldest message, which its new owner accounts from here on."""
        self.memory.shrink(self._frames.message_taken())

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write what the library sends by itself: its handshake, pongs and close frames."""
        self._check_open()
        self.close_sent = self.close_sent or bytes(data[:1]) == CLOSE
        await self.outbox.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the client's backlog is empty."""
        await self.outbox.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Do nothing: the server closes the socket."""
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """End reading and writing."""
        self.closed = True
        self._end()
        await trio.lowlevel.checkpoint()

    def _end(self) -> None:
        self.ended = True
        if self._while_open is not None:
            self._while_open.cancel(reason="the client left")

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Cancel the body as soon as the client has left."""
        with trio.CancelScope() as self._while_open:
            if self.ended:
                self._while_open.cancel(reason="the client left")
            yield

    def _check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError
