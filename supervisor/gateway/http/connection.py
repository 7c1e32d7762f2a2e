"""One HTTP connection: its requests one after the other, until it closes or becomes a WebSocket.

Requests go through the same steps on every route: the head is read, the caller is authorized, the body is read, the
route's handler writes the response. During the answer the socket is still read, for one reason: when the client leaves,
its request must be cancelled. A refused request gets a complete error response, and keeps its connection if the start
of the next request can be found.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio
from attrs import define, field

from protocol.access import Access
from protocol.errors import (
    BadRequest,
    Draining,
    MethodNotAllowed,
    NotFound,
    RequestError,
    SlowClient,
    UnsupportedMediaType,
)
from protocol.openapi.document import Operation
from protocol.trace import Trace
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.plain_head import RequestHead
from supervisor.gateway.http.request import ClientLeft, HttpRequest, Unreadable
from supervisor.gateway.http.request_reader import SHUTS_DOWN, RequestReader
from supervisor.gateway.http.response import HttpResponse
from supervisor.gateway.http.routes.route import Handler, Resource, RouteTable, options
from supervisor.gateway.http.upgrade import UpgradeHandshake, handshake_of, is_handshake, wants_websocket
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.origins import METHODS
from supervisor.gateway.outbox import Outbox

FORM = b"application/x-www-form-urlencoded"
JSON_OBJECT = re.compile(rb"[\t\n\v\f\r ]*+\{")
# A client has seen the end of its connection by then, or never looks: what it had sent before has come.
ON_ITS_WAY_S = 0.5

Upgrade = Callable[[UpgradeHandshake, str, ClientKey, Trace | None], Awaitable[None]]


@define(eq=False)
class HttpConnection:
    """One client connection for as long as it speaks HTTP; `upgrade` takes over if it asks for WebSocket."""

    outbox: Outbox
    gateway: Gateway
    routes: RouteTable
    upgrade: Upgrade
    busy: bool = False  # a whole request has been read, and its response has not ended; or a last one may come
    _reader: RequestReader = field(init=False)
    _ended: bool = False  # no more is answered, though the client may still be given time to read and to close

    def __attrs_post_init__(self) -> None:
        self._reader = RequestReader(self.outbox, self.gateway)

    @property
    def awaited(self) -> bool:
        """Whether its first request, or the rest of one of which a part has come, is still to come."""
        return not (self.busy or self._ended) and (not self._reader.answered or self._reader.begun)

    @property
    def linger_s(self) -> float:
        """The time in seconds for reading what the client sends after the end; unread, it would cause a reset."""
        close_s = self.gateway.limits.close_s
        if self._reader.unread:
            return close_s
        return min(ON_ITS_WAY_S, close_s) if self._reader.more_coming else 0.0

    def drain(self) -> None:
        """End the connection if it waits for its next request, and has for as long as it may in a drain."""
        self._reader.drain()

    def refuse_partial(self) -> None:
        """Refuse a request of which a part has been received: it would be refused as a whole, too."""
        self._reader.refuse_partial()

    def refuse(self, error: RequestError) -> None:
        """Refuse a connection before its first request."""
        self._reader.more_unread = True
        # The client may be gone already.
        with suppress(trio.BrokenResourceError):
            self._response().fail_last(error)

    async def run(self) -> None:
        """Serve requests until the client leaves or the connection must close."""
        try:
            while (head := await self._reader.head()) is not None:
                exchange = self._exchange(head)
                response = exchange.response
                if await self._upgraded(exchange):
                    return
                try:
                    await self._respond(exchange)
                finally:
                    response.release()
                # Unread bytes would reset the connection, and so destroy the response.
                self._reader.more_unread = response.closes
                if not self._reader.syntax.done or response.closes:
                    self._reader.more_coming = self.gateway.closes_connections
                    return
                # If the gateway leaves its port, no response has announced yet that the next request is the last.
                self.busy = self.gateway.port.leaving
                await self._reader.next_request()
        except Unreadable as unreadable:
            with suppress(SlowClient, trio.BrokenResourceError):
                self._response(unreadable.head).fail_last(unreadable.error, unreadable.status)
        except (ClientLeft, SlowClient, trio.BrokenResourceError):
            pass
        finally:
            self.busy, self._ended = False, True

    def _response(self, head: RequestHead | None = None) -> HttpResponse:
        request = HttpRequest(self.gateway, head)
        return HttpResponse(self.gateway, self.outbox, self._reader.syntax, request, closes=self._reader.overrun)

    def _exchange(self, head: RequestHead) -> Exchange:
        response = self._response(head)
        if response.request.has_two_lengths:
            # A proxy in front may have read the body by the other length.
            response.closes = True
        return Exchange(self.gateway, response.request, response, self.routes.operations)

    async def _upgraded(self, exchange: Exchange) -> bool:
        """Serve a client that asks for a WebSocket; return whether it did."""
        request, response = exchange.request, exchange.response
        if not wants_websocket(request):
            return False
        resource = self.routes.find(request.path)
        if resource is None or not resource.websocket:
            return False
        try:
            request.key = self.gateway.authorize(self.outbox, request.headers)
            if self.gateway.draining:
                raise Draining(SHUTS_DOWN)
            if not is_handshake(request):
                raise BadRequest("this is no WebSocket handshake of version 13")
            handshake = handshake_of(request, self._reader.trailing_bytes)
        except RequestError as error:
            # WebSocket frames may follow, so no next request can be found.
            response.fail_last(error)
        else:
            self._reader.more_unread = True
            await self.upgrade(handshake, request.id, request.key, request.caller)
        return True

    async def _respond(self, exchange: Exchange) -> None:
        await exchange.response.written_by(self._answer(exchange))
        if self.outbox.client_gone:
            raise ClientLeft

    async def _answer(self, exchange: Exchange) -> None:
        """Check a request, read its body, and run the handler of its route; raises the error that refuses it."""
        if self._answered_preflight(exchange):
            return
        request = exchange.request
        resource = self.routes.find(request.path)
        # A caller without a key is refused before it can find out which paths exist.
        access, probe = (Access.KEY, False) if resource is None else (resource.access, resource.probe)
        exchange.set_key(self.gateway.authorize(self.outbox, request.headers, access, probe=probe))
        handler, operation = _handler(request, resource)
        takes_file = operation is not None and operation.takes_file
        reads = takes_file or (operation is not None and operation.request is not None)
        if reads:
            # Before the refusals: refused requests count, too.
            request.key.charge()
            _check_media(request, takes_file=takes_file)
        body = Body(await self._reader.body(request))
        if reads and not takes_file:
            _check_form(request, body)
        self.busy = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reader.watch, exchange.response, nursery.cancel_scope)
            await exchange.response.written_by(handler(exchange, body))
            nursery.cancel_scope.cancel(reason="answered")

    def _answered_preflight(self, exchange: Exchange) -> bool:
        """Answer a CORS preflight, which carries no key; return whether it was one."""
        if exchange.request.method != "OPTIONS":
            return False
        if (headers := self.gateway.origins.preflight_headers(exchange.request.headers)) is None:
            return False
        exchange.response.reply(204, headers, b"")
        return True


FILES = frozenset({b"", b"application/octet-stream", FORM})
"""The media types of a file; `curl --data-binary` labels any as a form."""


def _handler(request: HttpRequest, resource: Resource | None) -> tuple[Handler, Operation | None]:
    """Return the handler of a request, and its operation if it may read a body; raises a `RequestError` without one."""
    if request.has_two_lengths:
        raise BadRequest("the body has two lengths: send content-length or transfer-encoding")
    if request.method == "CONNECT":
        request.allow = METHODS
        raise MethodNotAllowed("this server is no proxy")
    if resource is None:
        raise NotFound(f"there is nothing at {request.path[:200]}")
    request.allow = resource.allow
    if request.method == "OPTIONS":
        return options, None
    method = "GET" if request.method == "HEAD" else request.method
    if (route := resource.routes.get(method)) is None:
        raise MethodNotAllowed(f"{request.path} knows {resource.allow.decode()} only")
    request.probe = route.probe
    return route.handler, route.operation


def _check_media(request: HttpRequest, *, takes_file: bool) -> None:
    """Raise `UnsupportedMediaType` for a body that is encoded, or neither JSON nor the wanted file, by its headers."""
    if (coding := request.header(b"content-encoding").strip().lower()) not in {b"", b"identity"}:
        raise UnsupportedMediaType(f"the body is encoded as {_short(coding)}; send it unencoded")
    media = request.media_type
    if takes_file:
        if media not in FILES:
            raise UnsupportedMediaType(f"the body is {_short(media)}; send application/octet-stream")
        return
    accepted = media in {b"", b"application/json", b"text/json", FORM}
    if not accepted and not (media.startswith(b"application/") and media.endswith(b"+json")):
        raise UnsupportedMediaType(f"the body is {_short(media)}; send application/json")


def _check_form(request: HttpRequest, body: Body) -> None:
    """Raise `UnsupportedMediaType` for a form, unless it is JSON: many clients label that as a form by default."""
    if request.media_type == FORM and not JSON_OBJECT.match(body.data):
        raise UnsupportedMediaType("the body is a form; send application/json")


def _short(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))
