"""HTTP clients: h11 for the syntax, one request at a time, and the hand-over of an upgrade to WebSocket."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from urllib.parse import unquote

import h11
import trio
from attrs import define, field

from actors.processor import TextReply
from protocol.dialects import chat
from protocol.dialects import http as shapes
from protocol.errors import (
    BadRequest,
    Draining,
    Internal,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotReady,
    RequestError,
    SlowClient,
    TooLarge,
    UpgradeRequired,
)
from protocol.messages import Finished, Text
from supervisor.doors.asking import Counted
from supervisor.doors.door import Door
from supervisor.doors.outbox import Outbox

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
METRICS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
REQUEST_ID_LENGTH_MAX = 128
AHEAD_BYTES_MAX = 64 * 1024  # that a client may send while its request is being answered

CHAT = "/v1/chat/completions"

Header = tuple[bytes, bytes]
Handler = Callable[[bytes, str], Awaitable[None]]


class Gone(Exception):
    """The client has closed its sending side, which is leaving."""


@define(eq=False)
class HttpConnection:
    """One client connection for as long as it speaks HTTP; `upgrade` takes over if it asks for WebSocket."""

    outbox: Outbox
    door: Door
    upgrade: Callable[[bytes, str], Awaitable[None]]
    _syntax: h11.Connection = field(init=False)
    _raw: bytearray = field(factory=bytearray)  # what has come of this request, for whoever takes over
    _idle: trio.CancelScope | None = None
    _served: int = 0
    _unheard: bool = False
    _head_only: bool = False  # the request is a HEAD, so the answer has no body
    _allow: bytes = b"GET, HEAD"

    def __attrs_post_init__(self) -> None:
        self._syntax = h11.Connection(h11.SERVER, max_incomplete_event_size=self.door.limits.head_bytes_max)

    @property
    def unheard(self) -> bool:
        """Whether the client may have more to say than was read."""
        return self._unheard or self._syntax.their_state in {h11.SEND_BODY, h11.ERROR}

    def drain(self) -> None:
        """Let go of a connection that waits for its next request."""
        if self._idle is not None:
            self._idle.cancel(reason="drain")

    def refuse(self, error: RequestError) -> None:
        """Say no to a connection before it has said anything."""
        self._unheard = True
        with suppress(trio.BrokenResourceError):  # it is gone already
            self._send_error(error, self.door.new_id())

    async def run(self) -> None:
        """Serve requests until the client has had enough, or must close."""
        try:
            while (request := await self._head()) is not None:
                request_id = self._request_id(request)
                self._head_only = request.method == b"HEAD"
                if await self._upgraded(request, request_id):
                    return
                await self._respond(request, request_id)
                if self._syntax.our_state is not h11.DONE or self._syntax.their_state is not h11.DONE:
                    return
                if self.door.gate.draining:
                    return
                self._served += 1
                self._syntax.start_next_cycle()
                self._raw = bytearray(self._syntax.trailing_data[0])
        except (Gone, SlowClient, trio.BrokenResourceError):
            pass

    def _misread(self, error: h11.RemoteProtocolError) -> None:
        """Answer what is no HTTP; h11 knows which status says why."""
        sized = TooLarge if error.error_status_hint == 431 else BadRequest
        self._send_error(
            sized(f"not HTTP as this server reads it: {error}"), self.door.new_id(), error.error_status_hint
        )

    # Reading -----------------------------------------------------------------------------

    async def _head(self) -> h11.Request | None:
        """Return the next request's head, None if there will be none."""
        limits, self._head_only = self.door.limits, False
        with trio.move_on_after(limits.idle_s if self._served else limits.head_s) as self._idle:
            try:
                event = await self._event()
            except h11.RemoteProtocolError as error:
                self._misread(error)
                return None
            return event if isinstance(event, h11.Request) else None
        return None

    async def _event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        while (event := self._syntax.next_event()) is h11.NEED_DATA:
            if self._syntax.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                self.outbox.put(self._syntax.send(go_on) or b"")
            await self._read()
        return event

    async def _read(self) -> None:
        data = await self.outbox.receive_some()
        if self._idle is not None:  # from its first byte on a request is no longer idle
            self._idle.deadline = min(self._idle.deadline, trio.current_time() + self.door.limits.head_s)
            self._idle = None
        self._raw += data
        self._syntax.receive_data(bytes(data))

    async def _body(self) -> bytes:
        """Return the request's whole body; raises `TooLarge`, or `Gone` if it does not come."""
        body, limit = bytearray(), self.door.limits.body_bytes_max
        with trio.move_on_after(self.door.limits.body_s):
            while True:
                event = await self._event()
                if isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > limit:
                        raise TooLarge(f"the body is longer than {limit} bytes")
                elif isinstance(event, h11.EndOfMessage):
                    return bytes(body)
                else:
                    raise Gone
        raise Gone

    def _all_read(self) -> bool:
        """Whether the next request can be told from the rest of this one; reads of it what is there already."""
        try:
            while self._syntax.their_state is h11.SEND_BODY:
                if not isinstance(self._syntax.next_event(), h11.Data | h11.EndOfMessage):
                    return False
        except h11.RemoteProtocolError:
            return False
        return self._syntax.their_state is not h11.ERROR

    async def _watch(self, answering: trio.CancelScope) -> None:
        """Notice that the client leaves while it is being answered; keep what it sends ahead."""
        ahead = 0
        while ahead < AHEAD_BYTES_MAX:
            try:
                data = await self.outbox.receive_some()
            except trio.BrokenResourceError:
                data = b""
            self._syntax.receive_data(bytes(data))
            if not data:
                break
            ahead += len(data)
        self.outbox.gone = True
        answering.cancel(reason="the client left")

    # Answering ---------------------------------------------------------------------------

    def _request_id(self, request: h11.Request) -> str:
        """Return the client's own id of the request if it gave a decent one, else a new one."""
        given = dict(request.headers).get(b"x-request-id", b"")
        if 0 < len(given) <= REQUEST_ID_LENGTH_MAX and all(33 <= byte < 127 for byte in given):
            return given.decode()
        return self.door.new_id()

    async def _upgraded(self, request: h11.Request, request_id: str) -> bool:
        """Hand a WebSocket client over; return whether there was one."""
        headers = dict(request.headers)
        wants = headers.get(b"upgrade", b"").lower() == b"websocket"
        if not wants or _path(request) != "/v1/responses" or request.method != b"GET":
            return False
        try:
            self.door.check_caller(request.headers)
            if self.door.gate.draining:
                raise Draining("the server is shutting down")
            if not _is_handshake(request, headers):
                raise BadRequest("this is no WebSocket handshake of version 13")
        except RequestError as error:
            self._send_error(error, request_id)
        else:
            self._unheard = True
            await self.upgrade(bytes(self._raw), request_id)
        return True

    async def _respond(self, request: h11.Request, request_id: str) -> None:
        try:
            self.door.check_caller(request.headers)
            handler = self._handler(request)
            body = await self._body()
        except RequestError as error:
            self._send_error(error, request_id)
        except h11.RemoteProtocolError as error:
            self._misread(error)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery.cancel_scope)
                await self._handle(handler, body, request_id)
                nursery.cancel_scope.cancel(reason="answered")
        if self.outbox.gone:
            raise Gone

    async def _handle(self, handler: Handler, body: bytes, request_id: str) -> None:
        try:
            try:
                await handler(body, request_id)
            except RequestError as error:
                self._send_error(error, request_id)
            except trio.BrokenResourceError:
                raise
            except Exception:
                log.exception("a bug failed a request", extra={"request_id": request_id})
                self._send_error(Internal("the server made a mistake; its log has the details"), request_id)
        except (trio.BrokenResourceError, SlowClient):
            self._syntax.send_failed()  # nobody listens any more

    def _handler(self, request: h11.Request) -> Handler:
        path, method = _path(request), request.method.decode()
        gets: dict[str, Handler] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }
        self._allow = b"POST" if path == CHAT else b"GET, HEAD"
        if path == CHAT:
            if method != "POST":
                raise MethodNotAllowed(f"{path} knows POST only")
            return self._chat
        if path == "/v1/responses":
            raise UpgradeRequired("this server speaks the Responses API over WebSocket only")
        if path.startswith("/v1/models/"):
            gets[path] = partial(self._model, unquote(path.removeprefix("/v1/models/")))
        if path not in gets:
            raise NotFound(f"there is nothing at {path}")
        if method not in {"GET", "HEAD"}:
            raise MethodNotAllowed(f"{path} knows GET only")
        return gets[path]

    def _send_error(self, error: RequestError, request_id: str, status: int | None = None) -> None:
        """Answer with an error, unless the answer has begun: then it never ends, which is an error too."""
        if self._syntax.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            headers = [JSON, *shapes.error_headers(error)]
            if isinstance(error, UpgradeRequired):
                headers.append((b"upgrade", b"websocket"))
            if isinstance(error, MethodNotAllowed):
                headers.append((b"allow", self._allow))
            self._send(status or error.http_status, headers, shapes.error_body(error), request_id)
        else:
            self._syntax.send_failed()

    def _send(self, status: int, headers: list[Header], body: bytes, request_id: str) -> None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        head = self._head_bytes(status, headers, request_id)
        self.outbox.put(head + self._data(b"" if self._head_only else body) + self._end())

    def _head_bytes(self, status: int, headers: list[Header], request_id: str) -> bytes:
        headers = [*headers, (b"x-request-id", request_id.encode())]
        if self.door.gate.draining or not self._all_read():
            headers.append((b"connection", b"close"))
        return self._syntax.send(h11.Response(status_code=status, headers=headers)) or b""

    def _data(self, data: bytes) -> bytes:
        return self._syntax.send(h11.Data(data=data)) or b""

    def _end(self) -> bytes:
        return self._syntax.send(h11.EndOfMessage()) or b""

    # What can be asked -------------------------------------------------------------------

    async def _health(self, _: bytes, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        self._send(200, [TEXT], b"alive\n", request_id)

    async def _ready(self, _: bytes, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        if self.door.gate.draining:
            raise Draining("the server is shutting down")
        if (why := self.door.unready()) is not None:
            raise NotReady(why)
        self._send(200, [TEXT], b"ready\n", request_id)

    async def _metrics(self, _: bytes, request_id: str) -> None:
        self._send(200, [METRICS], await self.door.metrics_text(), request_id)

    async def _models(self, _: bytes, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        models = [served.model() for served in self.door.asking.served.values()]
        self._send(200, [JSON], shapes.models_body(models), request_id)

    async def _model(self, name: str, _: bytes, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        model = self.door.asking.served.get(name)
        if model is None:
            raise ModelNotFound(f"no model {name!r} is served here", param="model")
        self._send(200, [JSON], shapes.model_body(model.model()), request_id)

    async def _chat(self, body: bytes, request_id: str) -> None:
        asked = chat.parse(body)
        served = self.door.asking.find(asked.model)
        ours = self.door.new_id()
        respond = chat.to_respond(asked, request_id=ours)
        counted = Counted(request_id, asked.model, "chat", trio.current_time())
        created = int(self.door.now())
        pieces: list[str] = []
        chunks = chat.Chunks(asked, request_id=ours, created=created) if asked.stream else None

        def pass_on(reply: TextReply) -> None:
            if not isinstance(reply, Text):
                return
            if chunks is None:
                pieces.append(reply.text)
            else:
                self._stream(chunks.text(reply.text), request_id)

        try:
            finished = await self.door.answer(respond, served, counted, pass_on)
        except RequestError as error:
            if chunks is None or self._syntax.our_state is not h11.SEND_BODY:
                raise
            # The answer is cut: it says so, and the connection ends without the end of a body.
            farewell = self.outbox.put_farewell if isinstance(error, SlowClient) else self.outbox.put
            farewell(self._data(chunks.failed(error)))
            self._syntax.send_failed()
            return
        if chunks is None:
            text = "".join(pieces)
            whole = chat.completion(asked, request_id=ours, created=created, text=text, finished=finished)
            self._send(200, [JSON], whole, request_id)
        else:
            self._finish(chunks, finished, request_id)

    def _stream(self, chunk: bytes, request_id: str) -> None:
        """Write one server-sent event; the first one takes the head along."""
        head = self._head_bytes(200, EVENTS, request_id) if self._syntax.our_state is h11.SEND_RESPONSE else b""
        self.outbox.put(head + self._data(chunk))

    def _finish(self, chunks: chat.Chunks, finished: Finished, request_id: str) -> None:
        self._stream(chunks.finish(finished), request_id)
        self.outbox.put(self._end())


def _is_handshake(request: h11.Request, headers: dict[bytes, bytes]) -> bool:
    """Whether the WebSocket library, which reads the same bytes again, will find what it needs."""
    tokens = {token.strip().lower() for token in headers.get(b"connection", b"").split(b",")}
    return (
        request.http_version >= b"1.1"
        and b"upgrade" in tokens
        and bool(headers.get(b"sec-websocket-key"))
        and headers.get(b"sec-websocket-version") == b"13"
    )


def _path(request: h11.Request) -> str:
    return request.target.decode("latin-1").partition("?")[0]
