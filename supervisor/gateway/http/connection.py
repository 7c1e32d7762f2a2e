"""HTTP clients: h11 for the syntax, one request at a time, and the hand-over of an upgrade to WebSocket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

import h11
import trio
from attrs import define, field

from protocol.errors import (
    BadRequest,
    Draining,
    MethodNotAllowed,
    NotFound,
    RequestError,
    SlowClient,
    TooLarge,
)
from protocol.trace import Trace
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http import routes
from supervisor.gateway.http.exchange import Exchange
from supervisor.gateway.http.head_checks import HEADERS_MAX, VERSIONS, check_head
from supervisor.gateway.http.routes import Route
from supervisor.gateway.keys import Key
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import internal_error

AHEAD_BYTES_MAX = 64 * 1024  # of further requests, that are kept while one is being answered
HANDSHAKE = (b"connection", b"upgrade", b"sec-websocket-key", b"sec-websocket-version")
SAID_CHARACTERS_MAX = 200
SHUTS_DOWN = "the server is shutting down"
PIECES_A_TURN = 64  # of a body, before others may run: a piece can be a single byte
PIECES_FREE = 4  # that are read without waiting for those who send many
AHEAD_FREE = 4  # requests in a row that came before the answer to the one before them, and wait for nobody

Upgrade = Callable[[bytes, str, Key, Trace | None], Awaitable[None]]


class Gone(Exception):
    """The client has closed its sending side, which is leaving."""


@define(eq=False)
class HttpConnection:
    """One client connection for as long as it speaks HTTP; `upgrade` takes over if it asks for WebSocket."""

    outbox: Outbox
    door: Gateway
    upgrade: Upgrade
    _syntax: h11.Connection = field(init=False)
    _raw: bytearray | None = field(factory=bytearray)  # what has come of this head, for whoever takes over
    _idle: trio.CancelScope | None = None
    _patience: trio.CancelScope | None = None  # with the head or the body that comes now
    _cut: bool = False
    busy: bool = False  # a whole request has come, and its answer has not ended
    _served: int = 0
    _ahead: int = 0  # requests in a row that have come before the answer to the one before them
    _cut_short: bool = False  # more came ahead than is kept: one more is answered, with the word that it is the last
    _unheard: bool = False

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

    def cut(self) -> None:
        """Refuse what has come in part: the rest would be refused, too."""
        self._cut = True
        if self._patience is not None:
            self._patience.cancel(reason="drain")

    def refuse(self, error: RequestError) -> None:
        """Say no to a connection before it has said anything."""
        self._unheard = True
        with suppress(trio.BrokenResourceError):  # it is gone already
            exchange = self._exchange()
            exchange.last = True
            exchange.fail(error)

    async def run(self) -> None:
        """Serve requests until the client has had enough, or must close."""
        try:
            while (request := await self._head()) is not None:
                exchange = self._exchange(request)
                exchange.last = self._cut_short
                if await self._upgraded(exchange):
                    return
                try:
                    await self._respond(exchange)
                finally:
                    exchange.release()
                self._unheard = exchange.last  # what comes ahead of its time must not destroy what was answered
                if self._syntax.our_state is not h11.DONE or self._syntax.their_state is not h11.DONE:
                    return
                if exchange.last or self.door.gate.draining:
                    return
                self._served += 1
                self._syntax.start_next_cycle()
                self.busy = False
                self._raw = bytearray(self._syntax.trailing_data[0])
                await self._wait_turn()
        except (Gone, SlowClient, trio.BrokenResourceError):
            pass

    async def _wait_turn(self) -> None:
        """Let others run before a request that was sent ahead; whoever sends many of those waits for the others who do.

        A head is short, and may be refused in the turn in which it is read: thousands come in one piece.
        """
        self._ahead = self._ahead + 1 if self._raw else 0
        if self._ahead > AHEAD_FREE:
            await self.door.wait_turn()
        else:
            await trio.lowlevel.checkpoint()

    def _exchange(self, request: h11.Request | None = None) -> Exchange:
        return Exchange(self.door, self.outbox, self._syntax, request)

    def _misread(self, error: h11.RemoteProtocolError, exchange: Exchange | None = None) -> None:
        """Answer what is no HTTP; h11 knows which status says why."""
        sized = TooLarge if error.error_status_hint == 431 else BadRequest
        answered = exchange or self._exchange()
        said = str(error)[:SAID_CHARACTERS_MAX]  # h11's sentence holds all of an illegal line
        answered.fail(sized(f"not HTTP as this server reads it: {said}"), error.error_status_hint)

    def _starved(self, error: MemoryError, exchange: Exchange) -> None:
        """Answer what there was no memory for, once what had been read of it is let go of; the connection ends."""
        error.__traceback__ = None  # its frames hold what was read
        exchange.release()
        exchange.last = True
        exchange.fail(internal_error(error, exchange.request_id, exchange.trace))

    # Reading -----------------------------------------------------------------------------

    async def _head(self) -> h11.Request | None:
        """Return the next request's head, None if there will be none."""
        limits = self.door.limits
        begun = bool(self._raw)  # it was sent ahead, behind what has been answered
        with trio.move_on_after(limits.idle_s if self._served and not begun else limits.head_s) as patience:
            self._idle, self._patience = None if begun else patience, patience
            try:
                event = await self._event()
            except h11.RemoteProtocolError as error:
                self._misread(error)
                return None
            return event if isinstance(event, h11.Request) and self._fits(event) and self._is_strict(event) else None
        if self._raw:  # half a head has come; who has asked nothing needs no answer
            exchange = self._exchange()
            exchange.last = True
            exchange.fail(self._overdue("head", limits.head_s))
        return None

    def _fits(self, request: h11.Request) -> bool:
        """Refuse a head that is too long: h11 looks only at one that has not come as a whole."""
        size, limit = len(self._raw or b"") - len(self._syntax.trailing_data[0]), self.door.limits.head_bytes_max
        if size > limit:
            why = f"the head is {size} bytes long; at most {limit} are read"
        elif (count := len(request.headers)) > HEADERS_MAX:
            why = f"the head has {count} headers; at most {HEADERS_MAX} are read"
        else:
            return True
        self._unheard = True
        exchange = self._exchange(request)
        exchange.last = True
        exchange.fail(TooLarge(why), 431)
        return False

    def _is_strict(self, request: h11.Request) -> bool:
        """Refuse a head that somebody before this server may read otherwise."""
        raw = bytes(self._raw or b"")
        try:
            check_head(raw[: len(raw) - len(self._syntax.trailing_data[0])], request)
        except BadRequest as error:
            self._unheard = True
            exchange = self._exchange(request)
            exchange.last = True
            exchange.fail(error, None if request.http_version in VERSIONS else HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
            return False
        return True

    async def _event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        while (event := self._syntax.next_event()) is h11.NEED_DATA:
            if self._syntax.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.outbox.put(self._syntax.send(go_on) or b"")
            await self._read()
        return event

    async def _read(self) -> None:
        if self._cut_short:
            raise Gone  # what follows does not follow what was kept
        data = await self.outbox.receive_some()
        if self._idle is not None:  # from its first byte on a request is no longer idle
            self._idle.deadline = min(self._idle.deadline, trio.current_time() + self.door.limits.head_s)
            self._idle = None
        if self._raw is not None:
            self._raw += data
        self._syntax.receive_data(bytes(data))

    async def _body(self, exchange: Exchange) -> bytes:
        """Return the request's whole body; raises `TooLarge`, `SlowClient`, or `Gone` if it ends early."""
        body, limit, pieces = bytearray(), self.door.limits.body_bytes_max, 0
        if (size := exchange.header(b"content-length")) and int(size) > limit:
            raise TooLarge(f"the body is {int(size)} bytes long; at most {limit} are read")
        with trio.move_on_after(self.door.limits.body_s) as self._patience:
            while True:
                event = await self._event()
                if isinstance(event, h11.Data):
                    exchange.body_held.grow(len(event.data))
                    body += event.data
                    pieces += 1
                    if len(body) > limit:
                        raise TooLarge(f"the body is longer than {limit} bytes")
                    if pieces % PIECES_A_TURN == PIECES_FREE:
                        await self.door.wait_turn()
                elif isinstance(event, h11.EndOfMessage):  # with trailers perhaps, which mean nothing here
                    return bytes(body)
                else:
                    raise Gone
        raise self._overdue("body", self.door.limits.body_s)

    def _overdue(self, what: str, within_s: float) -> RequestError:
        """Return why a request that has come in part is waited for no longer."""
        return Draining(SHUTS_DOWN) if self._cut else SlowClient(f"the {what} did not come within {within_s} s")

    async def _watch(self, exchange: Exchange, answering: trio.CancelScope) -> None:
        """Notice that the client leaves while it is being answered; keep what it sends ahead, if it is not too much."""
        ahead = len(self._syntax.trailing_data[0])
        while True:
            try:
                data = await self.outbox.receive_some()
            except trio.BrokenResourceError:
                break
            if not data:
                break
            ahead += len(data)
            if ahead > AHEAD_BYTES_MAX or self._cut_short:  # read on: else it is not noticed that the client leaves
                self._cut_short = True
                exchange.last = exchange.last or not exchange.begun  # one that has begun cannot say so any more
            else:
                self._syntax.receive_data(bytes(data))
        self.outbox.gone = True
        answering.cancel(reason="the client left")

    # Answering ---------------------------------------------------------------------------

    async def _upgraded(self, exchange: Exchange) -> bool:
        """Hand a WebSocket client over; return whether there was one."""
        wants = exchange.header(b"upgrade").lower() == b"websocket"
        here = exchange.path == "/v1/responses" and self.door.serves(exchange.path)
        if not wants or not here or exchange.method != "GET":
            return False
        try:
            key = exchange.key = self.door.knock(self.outbox, exchange.headers)
            if self.door.gate.draining:
                raise Draining(SHUTS_DOWN)
            if not _is_handshake(exchange):
                raise BadRequest("this is no WebSocket handshake of version 13")
        except RequestError as error:
            exchange.last = True  # whoever asked to speak otherwise from here on may do so already
            exchange.fail(error)
        else:
            self._unheard = True
            raw = _handshake(exchange) + self._syntax.trailing_data[0]
            await self.upgrade(raw, exchange.request_id, key, exchange.caller)
        return True

    async def _respond(self, exchange: Exchange) -> None:
        self._raw = None
        if _has_two_lengths(exchange):
            exchange.last = True  # whoever stands before us may count the body otherwise
        try:
            if self._preflown(exchange):
                return
            route = routes.find(exchange.path) if self.door.serves(exchange.path) else None
            self._admit(exchange, route)
            handler = _handler(exchange, route)
            reads = route is not None and route.reads and exchange.method == "POST"
            if reads:
                (exchange.key or self.door.keys.anybody).charge()  # what is refused below counts too
                exchange.check_media()
            body = await self._body(exchange)
            if reads:
                exchange.check_form(body)
        except RequestError as error:
            exchange.fail(error)
        except h11.RemoteProtocolError as error:
            self._misread(error, exchange)
        except MemoryError as error:
            self._starved(error, exchange)
        else:
            self.busy = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, exchange, nursery.cancel_scope)
                await self._handle(handler, exchange, body)
                nursery.cancel_scope.cancel(reason="answered")
        if self.outbox.gone:
            raise Gone

    def _preflown(self, exchange: Exchange) -> bool:
        """Answer a browser that asks whether a page may ask; such a question carries no key."""
        if exchange.method != "OPTIONS" or (allowed := self.door.preflight(exchange.headers)) is None:
            return False
        exchange.reply(204, allowed, b"")
        return True

    def _admit(self, exchange: Exchange, route: Route | None) -> None:
        """Raise the `RequestError` by which this caller may not ask here; who may is counted.

        Strangers are refused before they can tell which paths exist.
        """
        if route is not None and route.open:
            self.door.let_in(self.outbox, exchange.headers)
        else:
            admin = route is not None and route.admin
            exchange.own(self.door.knock(self.outbox, exchange.headers, admin=admin))
        if _has_two_lengths(exchange):
            raise BadRequest("the body has two lengths: send content-length or transfer-encoding")

    async def _handle(self, handler: routes.Handler, exchange: Exchange, body: bytes) -> None:
        try:
            try:
                await handler(exchange, body)
            except RequestError as error:
                exchange.fail(error)
            except trio.BrokenResourceError:
                raise
            except MemoryError as error:
                self._starved(error, exchange)
            except Exception as bug:  # noqa: BLE001  # it is logged there
                exchange.fail(internal_error(bug, exchange.request_id, exchange.trace))
        except (trio.BrokenResourceError, SlowClient):
            self._syntax.send_failed()  # nobody listens any more
            exchange.settle(lost=True)
        finally:
            exchange.settle()


def _handler(exchange: Exchange, route: Route | None) -> routes.Handler:
    """Return what answers; raises `NotFound` or `MethodNotAllowed`."""
    if route is None:
        raise NotFound(f"there is nothing at {exchange.path[:200]}")
    exchange.allow = route.allow
    if exchange.method == "OPTIONS":
        return routes.options
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in route.methods:
        raise MethodNotAllowed(f"{exchange.path} knows {route.allow.decode()} only")
    return route.methods[method]


def _has_two_lengths(exchange: Exchange) -> bool:
    return bool(exchange.header(b"transfer-encoding") and exchange.header(b"content-length"))


def _handshake(exchange: Exchange) -> bytes:
    """Return the handshake as the WebSocket library reads it, which stumbles over bytes that mean nothing here."""
    lines = (
        b"GET %b HTTP/1.1" % (b"" if exchange.request is None else exchange.request.target),
        b"host: localhost",  # the client's own has been looked at
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: %b" % exchange.header(b"sec-websocket-key"),
    )
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _is_handshake(exchange: Exchange) -> bool:
    """Whether a request is a WebSocket handshake, and can be read in one way only."""
    if exchange.request is None:
        return False
    names = [name for name, _ in exchange.request.headers]
    if any(names.count(name) != 1 for name in HANDSHAKE):
        return False  # of two the library would take the last, and we both
    tokens = {token.strip().lower() for token in exchange.header(b"connection").split(b",")}
    return (
        exchange.request.http_version >= b"1.1"
        and b"upgrade" in tokens
        and bool(exchange.header(b"sec-websocket-key"))
        and exchange.header(b"sec-websocket-version") == b"13"
        and exchange.header(b"content-length") in {b"", b"0"}
        and not exchange.header(b"transfer-encoding")
    )
