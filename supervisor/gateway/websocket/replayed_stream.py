"""The bytes of a WebSocket client behind its handshake, at the pace at which they may be parsed.

All bytes that the parser gets are parsed in one turn, and every message is stored until it is taken. So the parser gets
a few frames in a turn of the event loop, clients that send many take turns, and memory is reserved for messages as they
come.
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

FRAMES_A_TURN = 64  # of one client: a frame may be empty
FRAMES_FREE = 4  # that are read without waiting for other clients that send many


@define(eq=False)
class ReplayedStream:
    """The bytes of one client, the first of which have been read already, right behind its handshake."""

    outbox: Outbox
    _unread: bytes | bytearray  # received, and not given to the parser yet
    memory: MemoryReservation  # for messages that have been received, in part or as a whole, and not been taken
    wait_read_turn: Callable[[], Awaitable[None]]  # called before many frames are read
    close_sent: bool = False  # a close frame of ours, after which nothing may follow
    received_at: float = 0.0  # when the last byte came
    ended: bool = False  # nothing more comes
    _frames: FrameCounter = field(factory=FrameCounter)
    _while_open: trio.CancelScope | None = None

    async def receive_some(self, max_bytes: int) -> bytes | bytearray:
        """Return the next bytes, a few frames at a time; none at the end."""
        if self._unread:
            await trio.lowlevel.checkpoint()
        else:
            self._unread = await self._receive(max_bytes)
        size, frames = self._frames.feed(self._unread[:max_bytes], FRAMES_A_TURN)
        data, self._unread = self._unread[:size], self._unread[size:]
        self._reserve()
        if frames > FRAMES_FREE:
            await self.wait_read_turn()
        return data

    async def _receive(self, max_bytes: int) -> bytes | bytearray:
        try:
            data = await self.outbox.receive_some(max_bytes)
        except trio.BrokenResourceError:
            self.end()
            raise
        if not data:
            self.end()
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

    def end(self) -> None:
        """Note that nothing more comes."""
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
