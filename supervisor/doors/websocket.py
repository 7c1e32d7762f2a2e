"""WebSocket clients: OpenAI's Responses mode, one lane a connection.

trio-websocket keeps the protocol; events enter the client's outbox as whole frames, in the turn in which their text
comes, and no task of this connection runs for them.
"""

from __future__ import annotations

import logging
from collections import deque
from urllib.parse import parse_qs, urlsplit

import trio
from attrs import define, field, frozen
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream
from wsproto.utilities import LocalProtocolError

from actors.processor import TextReply
from protocol.dialects import responses
from protocol.errors import (
    BadRequest,
    ConnectionExpired,
    Draining,
    Left,
    Overloaded,
    PreviousResponseNotFound,
    RequestError,
    SlowClient,
)
from protocol.messages import Accepted, Role, Started, Text, Turn, Usage
from supervisor.doors.asking import Counted, Served
from supervisor.doors.door import Door
from supervisor.doors.outbox import Outbox, close_frame, text_frame

log = logging.getLogger(__name__)

NORMAL, BUG, RESTARTING, TRY_AGAIN = 1000, 1011, 1012, 1013  # close codes


@define(eq=False)
class _Replayed(trio.abc.HalfCloseableStream):
    """A stream whose first bytes had been read already: the handshake, and what a hasty client sent after it.

    To close it is to read and write no more; the gateway closes the socket, once the client has been heard out.
    """

    stream: Outbox
    handshake: bytes
    after: bytes
    accepted: trio.Event = field(factory=trio.Event)  # before it, the library would not look at what follows
    closed: bool = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self.handshake:
            await trio.lowlevel.checkpoint()
            handshake, self.handshake = self.handshake, b""
            return handshake
        await self.accepted.wait()
        if self.after:
            after, self.after = self.after, b""
            return after
        self._check_open()
        return await self.stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._check_open()
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError


async def serve(outbox: Outbox, door: Door, raw: bytes, request_id: str) -> None:
    """Serve one WebSocket client from its handshake, whose bytes are `raw`, to its end."""
    try:
        await _serve(outbox, door, raw, request_id)
    except* LocalProtocolError as group:
        # The library's reader fails at a ping that comes after our close frame; there was nothing left to say anyway.
        log.debug("a client spoke after the end: %s", group.exceptions)


async def _serve(outbox: Outbox, door: Door, raw: bytes, request_id: str) -> None:
    async with trio.open_nursery() as nursery:
        try:
            head, blank, after = raw.lstrip().partition(b"\r\n\r\n")
            stream = _Replayed(outbox, head + blank, after)
            proposal = await wrap_server_stream(nursery, stream, max_message_size=door.limits.body_bytes_max)
            socket = await proposal.accept(extra_headers=[(b"x-request-id", request_id.encode())])
            stream.accepted.set()
            model = parse_qs(urlsplit(proposal.path).query).get("model", [None])[0]
            expires_at = trio.current_time() + door.limits.connection_s_max
            session = Session(socket, outbox, door, request_id, model, expires_at, draining=door.gate.draining)
            door.connections[outbox] = session
            await session.run()
        except ConnectionClosed:
            pass  # the client left during the handshake
        except Exception:
            outbox.put_farewell(close_frame(BUG, "the server made a mistake"))
            raise
        finally:
            nursery.cancel_scope.cancel(reason="the session has ended")


@frozen
class _Said:
    """The latest response of a connection, for the one that continues it."""

    id: str
    turns: tuple[Turn, ...]


@define(eq=False)
class Session:
    """One WebSocket client: requests wait their turn, and are answered one after the other."""

    socket: WebSocketConnection
    outbox: Outbox
    door: Door
    request_id: str
    model: str | None  # what a request asks for that names none
    _expires_at: float
    _draining: bool
    _waiting: deque[responses.Create] = field(factory=deque)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _running: tuple[responses.Create, responses.Events, Counted] | None = None
    _latest: _Said | None = None
    _too_slow: SlowClient | None = None

    def drain(self) -> None:
        """End when the last response has ended."""
        self._draining = True
        self._news.unpark_all()

    async def run(self) -> None:
        """Read and answer until the client leaves, is too slow, or is told to go."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, nursery.cancel_scope)
            code, reason = await self._answer_all()
            if self._too_slow is None:
                with trio.move_on_after(self.door.limits.close_s):
                    await self.socket.aclose(code=code, reason=reason)
            nursery.cancel_scope.cancel(reason="closed")
        if self._too_slow is not None:
            self.outbox.put_farewell(close_frame(TRY_AGAIN, self._too_slow.detail))

    # Listening ---------------------------------------------------------------------------

    async def _listen(self, session: trio.CancelScope) -> None:
        """Take whatever the client says, at once: the reader of a socket never waits for its answers."""
        try:
            while True:
                message = await self.socket.get_message()
                if isinstance(message, bytes):
                    self._say(responses.error_event(BadRequest("send text; binary messages mean nothing here")))
                else:
                    self._hear(message)
        except SlowClient as error:
            self._too_slow = error
        except (ConnectionClosed, trio.BrokenResourceError):
            pass
        session.cancel(reason="the client left")

    def _hear(self, message: str) -> None:
        try:
            event = responses.parse(message, default_model=self.model)
            if isinstance(event, responses.CancelResponse):
                self._cancel(event)
                return
            if self._draining:
                raise Draining("the server is shutting down; connect again")
            if len(self._waiting) >= self.door.limits.queued_max:
                raise Overloaded(f"{len(self._waiting)} responses wait for their turn on this connection")
        except RequestError as error:
            self._say(responses.error_event(error, responses.stream_id_of(message)))
        else:
            self._waiting.append(event)
            self._news.unpark()

    def _cancel(self, event: responses.CancelResponse) -> None:
        """End the response that the event names, running or waiting; one that has ended is nobody's mistake."""
        if self._running is not None:
            create, events, counted = self._running
            if event.response_id in {None, events.id} and event.stream_id in {None, create.stream_id}:
                self.door.asking.cut(counted, Left("the client sent response.cancel"))
                return
        waiting = [create for create in self._waiting if event.stream_id in {None, create.stream_id}]
        if waiting and event.response_id is None:  # one that waits has no id yet; the first of its lane is meant
            self._waiting.remove(waiting[0])
            events = responses.Events(waiting[0], request_id=self.door.new_id(), created_at=int(self.door.now()))
            self._say(*events.begin(), *events.cancelled(Usage(0, 0)))

    # Answering ---------------------------------------------------------------------------

    async def _answer_all(self) -> tuple[int, str]:
        """Answer one request after the other; return the close code and the reason when it is time to go."""
        try:
            while True:
                if trio.current_time() >= self._expires_at:
                    self._say(responses.error_event(ConnectionExpired("create a new connection to continue")))
                    return NORMAL, "the connection has reached its longest time"
                if self._waiting:
                    await self._answer(self._waiting.popleft())
                elif self._draining:
                    return RESTARTING, "the server is shutting down"
                else:
                    with trio.move_on_at(self._expires_at):
                        await self._news.park()
        except SlowClient as error:
            self._too_slow = error
        except trio.BrokenResourceError:
            pass
        return NORMAL, ""

    async def _answer(self, create: responses.Create) -> None:
        try:
            await self._respond(create, self._history(create), self.door.asking.find(create.model))
        except SlowClient:
            raise
        except RequestError as error:
            self._evict(create)
            self._say(responses.error_event(error, create.stream_id))

    def _history(self, create: responses.Create) -> tuple[Turn, ...]:
        wanted = create.previous_response_id
        if wanted is None:
            return ()
        if self._latest is None or self._latest.id != wanted:
            raise PreviousResponseNotFound(
                f"Previous response with id '{wanted}' not found.", param="previous_response_id"
            )
        return self._latest.turns

    def _evict(self, create: responses.Create) -> None:
        """Forget what a request that failed referred to, as OpenAI's server does."""
        if self._latest is not None and self._latest.id == create.previous_response_id:
            self._latest = None

    async def _respond(self, create: responses.Create, history: tuple[Turn, ...], served: Served) -> None:
        """Answer one request; raises the `RequestError` that ended it before its response had begun."""
        ours = self.door.new_id()
        events = responses.Events(create, request_id=ours, created_at=int(self.door.now()))
        counted = Counted(f"{self.request_id}/{ours}", create.model, "responses", trio.current_time())
        begun = False

        def pass_on(reply: TextReply) -> None:
            nonlocal begun
            match reply:
                case Text():
                    self._say(events.delta(reply.text))
                case Started():
                    self._say(*events.open())
                case Accepted():
                    begun = True
                    self._say(*events.begin())

        self._running = create, events, counted
        try:
            respond = responses.to_respond(create, request_id=ours, history=history)
            finished = await self.door.answer(respond, served, counted, pass_on)
        except SlowClient:
            raise
        except RequestError as error:
            if isinstance(error, Left):
                self._say(*(() if begun else events.begin()), *events.cancelled(counted.usage))
            elif not begun:
                raise
            else:
                self._evict(create)
                self._say(events.failed(error, counted.usage))
                return
        else:
            self._say(*events.finish(finished))
        finally:
            self._running = None
        self._latest = _Said(events.id, (*history, *create.turns(), Turn(Role.ASSISTANT, events.text)))

    def _say(self, *events: bytes) -> None:
        self.outbox.put(b"".join(map(text_frame, events)))
