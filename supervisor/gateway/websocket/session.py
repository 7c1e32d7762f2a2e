"""WebSocket clients: OpenAI's Responses mode.

trio-websocket keeps the protocol; events enter the client's outbox as whole frames, in the turn in which their text
comes, and no task of this connection runs for them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from urllib.parse import parse_qs, urlsplit

import trio
from attrs import define, field
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream
from wsproto.utilities import LocalProtocolError

from protocol.dialects import responses
from protocol.errors import (
    BadRequest,
    ConnectionExpired,
    Draining,
    InvalidStreamId,
    Overloaded,
    RequestError,
    SlowClient,
)
from protocol.trace import Trace, child_span
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import Key
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import READ_BYTES, Outbox, close_frame, text_frame
from supervisor.gateway.requests import NO_MEMORY, internal_error
from supervisor.gateway.websocket.frame_counter import FrameCounter
from supervisor.gateway.websocket.lanes import WHAT, Lanes
from supervisor.gateway.websocket.message_reader import Data, Event, MessageReader

log = logging.getLogger(__name__)

VIOLATIONS = {1002, 1003, 1007}  # of the protocol by the client, which the library notices
CLOSE = b"\x88"  # the first byte of a close frame
FRAMES_A_TURN = 64  # of one client: a frame may be empty
FRAMES_FREE = 4  # that are read without waiting for those who send many
NORMAL, BUG, RESTARTING, TRY_AGAIN = 1000, 1011, 1012, 1013  # close codes


@define(eq=False)
class _Replayed(trio.abc.HalfCloseableStream):
    """A stream whose first bytes had been read already: the handshake, and what a hasty client sent after it.

    To close it is to read and write no more; the gateway closes the socket, once the client has been heard out.
    """

    stream: Outbox
    handshake: bytes
    _unread: bytes | bytearray  # what has come, and is more than a turn may read
    held: MemoryReservation  # the memory of messages that have come, in part or as a whole, and that nobody has taken
    wait_turn: Callable[[], Awaitable[None]]  # before many frames are read
    accepted: trio.Event = field(factory=trio.Event)  # before it, the library would not look at what follows
    closed: bool = False
    said_goodbye: bool = False  # the library has sent a close frame
    heard_at: float = 0.0  # when the last byte came: a client that pings is there
    over: bool = False  # nothing more comes
    _heads: FrameCounter = field(factory=FrameCounter)
    _needed_by: trio.CancelScope | None = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self.handshake:
            await trio.lowlevel.checkpoint()
            handshake, self.handshake = self.handshake, b""
            return handshake
        await self.accepted.wait()
        self._check_open()
        if not self._unread:
            self._unread = await self._receive(max_bytes)
        size, frames = self._heads.take(self._unread[:max_bytes], FRAMES_A_TURN)
        data, self._unread = self._unread[:size], self._unread[size:]
        self._hold()
        if frames > FRAMES_FREE:
            await self.wait_turn()
        return data

    async def _receive(self, max_bytes: int | None) -> bytes | bytearray:
        try:
            data = await self.stream.receive_some(max_bytes)
        except trio.BrokenResourceError:
            self._end()
            raise
        if not data:
            self._end()
        self.heard_at = trio.current_time()
        return data

    def _hold(self) -> None:
        """Take the memory of what has come of messages."""
        try:
            self.held.grow(self._heads.kept_bytes - self.held.size_bytes)
        except Overloaded as error:
            self.said_goodbye = True
            self.stream.put_last(close_frame(TRY_AGAIN, error.detail))
            raise trio.BrokenResourceError(error.detail) from error

    def message_taken(self) -> None:
        """Give back the memory of the oldest message: whoever has it holds it from here on."""
        self.held.shrink(self._heads.message_taken())

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._check_open()
        self.said_goodbye = self.said_goodbye or bytes(data[:1]) == CLOSE
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True
        self._end()
        await trio.lowlevel.checkpoint()

    def _end(self) -> None:
        self.over = True
        if self._needed_by is not None:
            self._needed_by.cancel(reason="the client left")

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Leave the body as soon as the client has left."""
        with trio.CancelScope() as self._needed_by:
            if self.over:
                self._needed_by.cancel(reason="the client left")
            yield

    def _check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError


async def serve(
    outbox: Outbox, door: Gateway, raw: bytes, request_id: str, key: Key | None = None, caller: Trace | None = None
) -> None:
    """Serve one WebSocket client from its handshake, whose bytes are `raw`, to its end; `caller` asked for it."""
    try:
        with door.bodies.holding(door.memory_owner(key), READ_BYTES) as held:
            await _serve(outbox, door, raw, request_id, key, caller, held)
    except* LocalProtocolError as group:
        # The library's reader fails at a ping that comes after our close frame; there was nothing left to say anyway.
        log.debug("a client spoke after the end: %s", group.exceptions)
    except* MemoryError:
        internal_error(MemoryError(), request_id, caller)
        with suppress(trio.BrokenResourceError):  # it is gone already
            outbox.put_last(close_frame(TRY_AGAIN, NO_MEMORY))


def _is_starved(error: Exception) -> bool:
    """Return whether an error, or every one of a group, is a lack of memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, ExceptionGroup) and all(_is_starved(each) for each in error.exceptions)
    )


async def _serve(
    outbox: Outbox,
    door: Gateway,
    raw: bytes,
    request_id: str,
    key: Key | None,
    caller: Trace | None,
    held: MemoryReservation,
) -> None:
    async with trio.open_nursery() as nursery:
        try:
            head, blank, after = raw.lstrip().partition(b"\r\n\r\n")
            stream = _Replayed(outbox, head + blank, after, held, door.wait_turn, heard_at=trio.current_time())
            # A handshake that we take for one and the library does not would be waited for without end.
            with trio.move_on_after(door.limits.head_s) as patience:
                proposal = await wrap_server_stream(nursery, stream, max_message_size=door.limits.body_bytes_max)
                socket = await proposal.accept(extra_headers=[(b"x-request-id", request_id.encode())])
            if not patience.cancelled_caught:
                stream.accepted.set()
                model = parse_qs(urlsplit(proposal.path).query).get("model", [None])[0]
                session = Session(
                    socket, outbox, stream, door, request_id, key, caller, model, draining=door.gate.draining
                )
                door.connections[outbox] = session
                await session.run()
        except ConnectionClosed:
            pass  # the client left during the handshake
        except Exception as error:
            if not _is_starved(error):
                outbox.put_last(close_frame(BUG, "the server made a mistake"))
            raise
        finally:
            nursery.cancel_scope.cancel(reason="the session has ended")


@define(eq=False)
class Session:
    """One WebSocket client: what it says is taken at once, and answered in lanes."""

    socket: WebSocketConnection
    outbox: Outbox
    stream: _Replayed
    door: Gateway
    request_id: str
    key: Key | None
    caller: Trace | None  # where the client stood in a trace when it connected
    model: str | None  # what a request asks for that names none
    _draining: bool
    _expires_at: float = 0.0
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _scope: trio.CancelScope | None = None
    _too_slow: SlowClient | None = None
    _closing: bool = False
    _lanes: Lanes | None = None
    _hearing: MessageReader | None = None

    @property
    def busy(self) -> bool:
        """Whether a response runs or waits, or a message waits to be read."""
        return any(part is not None and part.busy for part in (self._lanes, self._hearing))

    def drain(self) -> None:
        """End when the last response has ended."""
        self._draining = True
        self._news.unpark_all()

    def cut(self) -> None:
        """Do nothing more: a drain has closed what waits for the rest of a message."""

    async def run(self) -> None:
        """Read and answer until the client leaves, is too slow, or is told to go."""
        try:
            await self._run()
        finally:
            if self._lanes is not None:
                self._lanes.close()

    async def _run(self) -> None:
        self._expires_at = trio.current_time() + self.door.limits.websocket_s_max
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            lanes = Lanes(
                self.door,
                self.key,
                self.request_id,
                self.caller,
                self._expires_at,
                self._say,
                self._lost,
                self._at_rest,
                nursery,
                self.outbox,
            )
            self._lanes = lanes
            self._hearing = MessageReader(
                self.door,
                self.key,
                self.model,
                self.stream.while_open,
                self._hear,
                lanes.cancels,
                self._lost,
                self._look_again,
                nursery,
            )
            nursery.start_soon(self._listen, self._hearing)
            code, reason = await self._time_to_go()
            self._closing = True
            with trio.move_on_after(self.door.limits.close_s):
                await self.socket.aclose(code=code, reason=reason)
            nursery.cancel_scope.cancel(reason="closed")
        if self._too_slow is not None:
            self.outbox.put_last(close_frame(TRY_AGAIN, self._too_slow.detail))

    async def _time_to_go(self) -> tuple[int, str]:
        """Wait until nothing is being answered and nothing more will be; return the close code and the reason."""
        limits = self.door.limits
        while True:
            busy = self.busy
            now, idle_at = trio.current_time(), self.stream.heard_at + limits.websocket_idle_s
            if not busy and self._draining:
                return RESTARTING, "the server is shutting down"
            if not busy and now >= self._expires_at:
                return self._expired()
            if not busy and now >= idle_at:
                return NORMAL, f"nothing was said for {limits.websocket_idle_s} s"
            with trio.move_on_at(inf if busy else min(self._expires_at, idle_at)):
                await self._news.park()

    def _at_rest(self) -> None:
        self.stream.heard_at = trio.current_time()  # the client may have been waiting for this
        self._look_again()

    def _look_again(self) -> None:
        self._news.unpark_all()

    def _expired(self) -> tuple[int, str]:
        try:
            self._say(responses.error_event(ConnectionExpired("create a new connection to continue")))
        except (SlowClient, trio.BrokenResourceError) as error:
            self._lost(error)
        return NORMAL, "the connection has reached its longest time"

    # Listening ---------------------------------------------------------------------------

    async def _listen(self, hearing: MessageReader) -> None:
        """Take whatever the client says, at once: the reader of a socket never waits for its answers."""
        try:
            while True:
                message = await self.socket.get_message()
                if isinstance(message, bytes) and not self._closing:
                    self._say(responses.error_event(BadRequest("send text; binary messages mean nothing here")))
                elif isinstance(message, str):
                    hearing.take(message)
                self.stream.message_taken()
        except ConnectionClosed as error:
            self._farewell(error)
            self._lost(error)
        except (SlowClient, trio.BrokenResourceError) as error:
            self._lost(error)

    def _farewell(self, error: ConnectionClosed) -> None:
        """Say why, if the client has broken the protocol: the library closes without a word (RFC 6455, 7.1.7)."""
        if error.reason is not None and error.reason.code in VIOLATIONS and not self.stream.said_goodbye:
            self.stream.said_goodbye = True
            with suppress(trio.BrokenResourceError):  # it is gone already
                self.outbox.put_last(close_frame(error.reason.code, error.reason.reason or ""))

    def _hear(self, event: Event | RequestError, data: Data, size_bytes: int) -> None:
        """Do what a message says; after our close frame nothing may be said."""
        lanes = self._lanes
        if self._closing or lanes is None:
            return
        try:
            if data.get("type") != "response.cancel":  # what cannot be read counts too
                (self.key or self.door.keys.anybody).charge()
            if isinstance(event, RequestError):
                raise event  # it is told as a key's own limit is
        except RequestError as error:
            self._misheard(error, data, lanes)
            return
        self._obey(event, size_bytes, lanes)

    def _obey(self, event: Event, size_bytes: int, lanes: Lanes) -> None:
        try:
            if isinstance(event, responses.CancelResponse):
                lanes.cancel(event)
            elif self._draining:
                raise Draining("the server is shutting down; connect again")
            else:
                lanes.hear(event, size_bytes)
        except SlowClient:
            raise
        except RequestError as error:
            self._refuse(error, event.stream_id)

    def _misheard(self, error: RequestError, data: Mapping[str, object], lanes: Lanes) -> None:
        """Refuse what cannot be read; its lane forgets what it continued, as after any other failure."""
        if isinstance(error, BadRequest) and error.param == "stream_id":
            self._refuse(InvalidStreamId(error.detail, param=error.param), None)
        else:
            lane, continued = responses.stream_id_of(data), data.get("previous_response_id")
            lanes.forget(lane, continued if isinstance(continued, str) else None)
            self._refuse(error, lane)

    def _refuse(self, error: RequestError, lane: str | None) -> None:
        trace = child_span(self.caller, self.door.new_id())
        self.door.refused(error, request_id=self.request_id, what=WHAT, key=self.key, trace=trace)
        self._say(responses.error_event(error, lane))

    def _lost(self, error: Exception) -> None:
        """End everything that is being answered: nobody reads it."""
        if isinstance(error, SlowClient):
            self._too_slow = error
        if self._scope is not None:
            self._scope.cancel(reason="the client left")

    def _say(self, *events: bytes) -> int:
        if self.stream.said_goodbye:  # after a close frame nothing may follow (RFC 6455, 5.5.1)
            raise trio.BrokenResourceError("the client has left")
        frames = b"".join(map(text_frame, events))
        self.outbox.put(frames)
        return len(frames)
