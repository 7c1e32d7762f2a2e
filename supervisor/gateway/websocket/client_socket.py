"""The socket of a WebSocket client behind its handshake: messages from frames, pongs, and close frames.

wsproto parses the frames (masks, fragments, UTF-8, rules), without I/O and without a task: they are read, and pings and
close frames are answered, by the task that waits for the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio
from attrs import define, field
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from supervisor.gateway.outbox import Outbox
from supervisor.gateway.websocket.frames import TOO_BIG, close_frame
from supervisor.gateway.websocket.replayed_stream import ReplayedStream

READ_BYTES = 16 * 1024  # that are parsed in one turn


@define(eq=False)
class ClientSocket:
    """Messages of one client, which may have `message_max` characters (binary ones: bytes)."""

    outbox: Outbox
    stream: ReplayedStream
    message_max: int
    active_at: float  # when the client last sent anything of its own, a ping for example, or an answer to it ended
    on_pong: Callable[[bytes], None]  # called with the payload of each pong
    _parser: Connection = field(factory=lambda: Connection(ConnectionType.SERVER))
    _events: Iterator[Event] = field(factory=lambda: iter(()))
    _parts: bytearray = field(factory=bytearray)  # of a message that is not whole; an empty one takes nothing
    _size: int = 0  # of that message

    async def receive(self) -> str | bytes:
        """Return the next message; other tasks run before it does.

        Raises `trio.BrokenResourceError` once the client has left, or was sent a close frame for a mistake, and
        `SlowClient` if it does not read what it is sent in return.
        """
        has_read = False
        while True:
            for event in self._events:
                if (message := self._handle(event)) is not None:
                    if not has_read:
                        await trio.lowlevel.checkpoint()
                    return message
            data = await self.stream.receive_some(READ_BYTES)
            if not data:
                raise trio.BrokenResourceError("the client has left")
            self._parser.receive_data(bytes(data))
            self._events, has_read = self._parser.events(), True

    def close(self, code: int, reason: str) -> None:
        """Send a close frame behind everything else, unless one was sent; raises as `Outbox.put` does."""
        if not self.stream.close_sent:
            self.stream.close_sent = True
            self.outbox.put(close_frame(code, reason))

    def _handle(self, event: Event) -> str | bytes | None:
        """Act on one event; return the message that it completes."""
        if isinstance(event, Pong):
            self.on_pong(bytes(event.payload))
            return None
        self.active_at = trio.current_time()
        match event:
            case TextMessage() | BytesMessage():
                return self._add(event)
            case Ping() if not self.stream.close_sent:
                self.outbox.put(self._parser.send(event.response()))
            case CloseConnection():
                self._answer_close(event)
                self._end("the client has closed")
        return None

    def _add(self, event: TextMessage | BytesMessage) -> str | bytes | None:
        """Add the next part of a message, and return the message if it is whole."""
        self._size += len(event.data)
        if self._size > self.message_max:
            limit = f"{self.message_max} (body_bytes_max)"
            self.close(TOO_BIG, f"a message is longer than {limit}; images may be named by URLs of allowed hosts")
            self._end("a message is too long")
        data = event.data
        # Nearly every message comes in one frame.
        if event.message_finished and not self._parts:
            message = data if isinstance(data, str) else bytes(data)
        else:
            self._parts += data.encode() if isinstance(data, str) else data
            if not event.message_finished:
                return None
            message = self._parts.decode() if isinstance(data, str) else bytes(self._parts)
            self._parts = bytearray()
        self._size = 0
        return message

    def _answer_close(self, event: CloseConnection) -> None:
        """Send the close frame that answers one of the client, or a violation of the protocol (RFC 6455, 7.1.7)."""
        if self.stream.close_sent:
            return
        self.stream.close_sent = True
        # `wsproto` reports a violation in the same way.
        if self._parser.state is ConnectionState.OPEN:
            self.outbox.put_last(close_frame(event.code, event.reason or ""))
        else:
            self.outbox.put(self._parser.send(event.response()))

    def _end(self, reason: str) -> None:
        self.stream.end()
        raise trio.BrokenResourceError(reason)
