"""One WebSocket client: the events of OpenAI's Responses API in both directions.

Events are written to the client's outbox as whole frames, in the turn in which their text comes: no task of this
connection runs for a token. Messages are read as soon as they come, because pings and the client's end are found only
behind them, and are parsed and answered by other tasks, within limits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from urllib.parse import parse_qs, urlsplit

import trio
from attrs import define, field

from actors.kit.groups import consists_of
from protocol.dialects import responses
from protocol.dialects.targets import NO_TARGETS, Targets
from protocol.errors import BadRequest, ConnectionExpired, Draining, InvalidStreamId, RequestError, SlowClient
from protocol.trace import Trace
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.histories import ResponseHistory
from supervisor.gateway.http.upgrade import UpgradeHandshake
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import READ_BYTES, Outbox
from supervisor.gateway.requests import NO_MEMORY, internal_error
from supervisor.gateway.websocket.client_socket import ClientSocket
from supervisor.gateway.websocket.frames import BUG, NORMAL, RESTARTING, TRY_AGAIN, close_frame, text_frame
from supervisor.gateway.websocket.lane_response import CREATE, LaneAnswers
from supervisor.gateway.websocket.lanes import Lanes
from supervisor.gateway.websocket.message_reader import Event, Fields, MessageReader
from supervisor.gateway.websocket.pings import PING_AFTER_S, Pings
from supervisor.gateway.websocket.replayed_stream import ReplayedStream

log = logging.getLogger(__name__)


async def serve(
    outbox: Outbox,
    gateway: Gateway,
    handshake: UpgradeHandshake,
    request_id: str,
    key: ClientKey | None = None,
    caller: Trace | None = None,
) -> None:
    """Serve one WebSocket client from the answer to its handshake to its end; `caller` is its trace."""
    try:
        with gateway.memory.bodies.reserving(gateway.memory_owner(key), READ_BYTES) as memory:
            await _serve(outbox, gateway, handshake, request_id, key, caller, memory)
    except* MemoryError:
        internal_error(MemoryError(), request_id, caller)
        # The client may be gone already.
        with suppress(trio.BrokenResourceError):
            outbox.put_last(close_frame(TRY_AGAIN, NO_MEMORY))


async def _serve(
    outbox: Outbox,
    gateway: Gateway,
    handshake: UpgradeHandshake,
    request_id: str,
    key: ClientKey | None,
    caller: Trace | None,
    memory: MemoryReservation,
) -> None:
    try:
        outbox.put(handshake.response)
        now, pings = trio.current_time(), Pings()
        stream = ReplayedStream(outbox, handshake.unread, memory, gateway.turns.wait_read, received_at=now)
        socket = ClientSocket(outbox, stream, gateway.limits.body_bytes_max, active_at=now, on_pong=pings.ponged)
        model = parse_qs(urlsplit(handshake.target).query).get("model", [None])[0]
        session = Session(
            socket,
            outbox,
            stream,
            pings,
            gateway,
            request_id,
            key,
            caller,
            model,
            draining=gateway.draining,
            first_until=now + gateway.limits.head_s,
            targets=handshake.targets,
        )
        gateway.connections.upgrade(outbox, session)
        await session.run()
    except trio.BrokenResourceError:
        # The client left during the handshake.
        pass
    except Exception as error:
        if not consists_of(error, MemoryError):
            # The client may be gone already, and the bug must be logged.
            with suppress(trio.BrokenResourceError):
                outbox.put_last(close_frame(BUG, "the server made a mistake"))
        raise


@define(eq=False)
class Session:
    """One WebSocket client: its messages are read at once, and answered in lanes."""

    socket: ClientSocket
    outbox: Outbox
    stream: ReplayedStream
    pings: Pings
    gateway: Gateway
    request_id: str
    key: ClientKey | None
    caller: Trace | None  # where the client stood in a trace when it connected
    default_model: str | None  # of requests that name none
    _draining: bool
    _first_until: float  # until when its first message is waited for in a drain
    targets: Targets = NO_TARGETS  # of requests that name none
    _asked: bool = False  # any message has come as a whole
    _expires_at: float = 0.0
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _scope: trio.CancelScope | None = None
    _too_slow: SlowClient | None = None
    _closing: bool = False
    _lanes: Lanes | None = None
    _messages: MessageReader | None = None

    @property
    def busy(self) -> bool:
        """Whether a response runs or waits, or a message waits to be parsed."""
        return any(part is not None and part.busy for part in (self._lanes, self._messages))

    @property
    def awaited(self) -> bool:
        """Whether its first message is still to come, for which it has as long as for the head of a request."""
        return not self._asked and trio.current_time() < self._first_until

    def drain(self) -> None:
        """End once the last response has ended."""
        self._draining = True
        self._wake()

    def refuse_partial(self) -> None:
        """Do nothing: a session that waits for the rest of a message has been closed by the drain."""

    async def run(self) -> None:
        """Read and answer messages until the client leaves or is dropped, or a limit or a drain ends the session."""
        try:
            await self._run()
        finally:
            if self._lanes is not None:
                self._lanes.close()

    async def _run(self) -> None:
        self._expires_at = trio.current_time() + self.gateway.limits.websocket_s_max
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            lanes = self._lanes = Lanes(
                gateway=self.gateway,
                answers=self._answers(),
                caller=self.caller,
                on_lost=self._on_lost,
                on_idle=self._on_idle,
                tasks=nursery,
                targets=self.targets,
            )
            messages = self._messages = MessageReader(
                self.gateway,
                self.key,
                self.default_model,
                self.stream.while_open,
                self._on_event,
                lanes.cancels_running,
                self._on_lost,
                self._wake,
                nursery,
            )
            nursery.start_soon(self._read, messages)
            code, reason = await self._wait_to_close()
            self._closing = True
            with suppress(SlowClient, trio.BrokenResourceError):
                self.socket.close(code, reason)
            # The server waits for the client's own close frame.
            nursery.cancel_scope.cancel(reason="closed")
        if self._too_slow is not None:
            self.outbox.put_last(close_frame(TRY_AGAIN, self._too_slow.detail))

    def _answers(self) -> LaneAnswers:
        owner = "" if self.key is None else self.key.name
        return LaneAnswers(
            gateway=self.gateway,
            key=self.key,
            request_id=self.request_id,
            expires_at=self._expires_at,
            send=self._send,
            outbox=self.outbox,
            history=ResponseHistory(self.gateway.limits.history_bytes_max, self.gateway.memory.histories, owner),
        )

    async def _wait_to_close(self) -> tuple[int, str]:
        """Wait until nothing is being answered and nothing more will be; return the close code and the reason."""
        limits = self.gateway.limits
        while True:
            busy = self.busy
            now, idle_at = trio.current_time(), self.socket.active_at + limits.websocket_idle_s
            if not busy and self._draining:
                return RESTARTING, "the server is shutting down"
            if not busy and now >= self._expires_at:
                return self._expired()
            if not busy and now >= idle_at:
                return NORMAL, f"nothing was received for {limits.websocket_idle_s} s"
            # Its next deadline is later, so the end of a response need not wake this task.
            if busy:
                idle_at = max(idle_at, now + limits.websocket_idle_s)
            wake_at = inf if busy and now >= self._expires_at else min(self._expires_at, idle_at)
            if self.gateway.keepalive_s:
                wake_at = min(wake_at, self._ping(now, answered=busy))
            with trio.move_on_at(wake_at):
                await self._changed.park()

    def _ping(self, now: float, *, answered: bool) -> float:
        """Ping the client if that is due, or end the connection if it is gone; return when to look again."""
        outbox, pings, received_at = self.outbox, self.pings, self.stream.received_at
        if now >= pings.gone_at(received_at, answered=answered):
            outbox.drop_reason = "silent"
            self._on_lost(SlowClient("the client answers no ping"))
        elif now >= pings.due_at(received_at):
            # A backlog has its own deadline, and nothing may follow a close frame.
            if outbox.backlog_bytes or self.stream.close_sent:
                return now + PING_AFTER_S
            try:
                outbox.put(pings.ping(now, received_at, outbox.accepted_bytes))
            except trio.BrokenResourceError as error:
                self._on_lost(error)
        return min(pings.due_at(received_at), pings.gone_at(received_at, answered=answered))

    def _on_idle(self) -> None:
        # The client may have been waiting for this.
        now = self.socket.active_at = trio.current_time()
        if self._draining or now >= self._expires_at:
            self._wake()

    def _wake(self) -> None:
        self._changed.unpark_all()

    def _expired(self) -> tuple[int, str]:
        try:
            self._send(responses.error_event(ConnectionExpired("create a new connection to continue")))
        except (SlowClient, trio.BrokenResourceError) as error:
            self._on_lost(error)
        return NORMAL, "the connection has reached its age limit"

    # Messages of the client --------------------------------------------------------------

    async def _read(self, messages: MessageReader) -> None:
        """Read every message as it comes, however many wait to be answered."""
        try:
            while True:
                message = await self.socket.receive()
                self._asked = True
                if isinstance(message, bytes) and not self._closing:
                    self._send(responses.error_event(BadRequest("send text; binary messages mean nothing here")))
                elif isinstance(message, str):
                    messages.receive(message)
                # A message may have megabytes, and the next one may never come.
                del message
                self.stream.message_taken()
        except (SlowClient, trio.BrokenResourceError) as error:
            self._on_lost(error)

    def _on_event(self, event: Event | RequestError, fields: Fields, size_bytes: int) -> None:
        """Act on a message, unless this server is closing."""
        lanes = self._lanes
        if self._closing or lanes is None:
            return
        try:
            # Unparsable messages are charged as well.
            if fields.get("type") != "response.cancel":
                (self.key or self.gateway.keys.anonymous).charge()
            if isinstance(event, RequestError):
                # It is answered in the same way as an exceeded limit of the key.
                raise event
        except RequestError as error:
            self._refuse_unparsed(error, fields, lanes)
            return
        self._dispatch(event, size_bytes, lanes)

    def _dispatch(self, event: Event, size_bytes: int, lanes: Lanes) -> None:
        try:
            if isinstance(event, responses.CancelResponse):
                lanes.cancel(event)
            elif self._draining:
                raise Draining("the server is shutting down; connect again")
            else:
                lanes.create(event, size_bytes)
        except SlowClient:
            raise
        except RequestError as error:
            self._refuse(error, event.stream_id)

    def _refuse_unparsed(self, error: RequestError, fields: Mapping[str, object], lanes: Lanes) -> None:
        """Refuse a message that is no event; its lane forgets the response to be continued."""
        if isinstance(error, BadRequest) and error.param == "stream_id":
            self._refuse(InvalidStreamId(error.detail, param=error.param), None)
        else:
            lane, continued = responses.stream_id_of(fields), fields.get("previous_response_id")
            lanes.forget(lane, continued if isinstance(continued, str) else None)
            self._refuse(error, lane)

    def _refuse(self, error: RequestError, lane: str | None) -> None:
        trace = self.gateway.runtime.next_span(self.caller)
        self.gateway.access_log.log_refused(
            error, request_id=self.request_id, request_line=CREATE, key=self.key, trace=trace
        )
        self._send(responses.error_event(error, lane))

    def _on_lost(self, error: Exception) -> None:
        """End every response, since the client is gone or was dropped."""
        if isinstance(error, SlowClient):
            self._too_slow = error
        if self._scope is not None:
            self._scope.cancel(reason="the client left")

    def _send(self, *events: bytes) -> int:
        # After a close frame nothing may follow (RFC 6455, 5.5.1).
        if self.stream.close_sent:
            raise trio.BrokenResourceError("the client has left")
        frames = text_frame(events[0]) if len(events) == 1 else b"".join(map(text_frame, events))
        self.outbox.put(frames)
        return len(frames)
