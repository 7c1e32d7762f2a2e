"""One HTTP connection: its requests one after the other, until it closes or becomes a WebSocket.

A request goes through the same steps whatever its route: its head is read, its caller is authorized, its body is read,
its route answers. During the answer the socket is still read, for one reason: when the client leaves, its request must
be cancelled. A refused request gets a complete error response, and keeps its connection if the start of the next
request can be found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio
from attrs import define, field

from protocol.access import Access
from protocol.errors import BadRequest, Draining, MethodNotAllowed, NotFound, RequestError, SlowClient
from protocol.trace import Trace
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.heads.plain_head import RequestHead
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.request_reader import SHUTS_DOWN, ClientLeft, RequestReader, Unreadable
from supervisor.gateway.http.routes.route import Handler, Resource, RouteTable, options
from supervisor.gateway.http.upgrade import UpgradeHandshake, handshake_of, is_handshake, wants_websocket
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import internal_error

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
        with suppress(trio.BrokenResourceError):  # it is gone already
            self._fail_last(self._exchange(), error)

    async def run(self) -> None:
        """Serve requests until the client leaves or the connection must close."""
        try:
            while (request := await self._reader.head()) is not None:
                exchange = self._exchange(request)
                exchange.closes = self._reader.overrun
                if await self._upgraded(exchange):
                    return
                try:
                    await self._respond(exchange)
                finally:
                    exchange.release()
                self._reader.more_unread = exchange.closes  # unread bytes would reset the connection, and the response
                if not self._reader.syntax.done or exchange.closes:
                    self._reader.more_coming = self.gateway.closes_connections
                    return
                self.busy = self.gateway.leaving  # this client has not been told that its next request is the last
                await self._reader.next_request()
        except Unreadable as unreadable:
            with suppress(SlowClient, trio.BrokenResourceError):
                self._fail_last(self._exchange(unreadable.request), unreadable.error, unreadable.status)
        except (ClientLeft, SlowClient, trio.BrokenResourceError):
            pass
        finally:
            self.busy, self._ended = False, True

    def _exchange(self, request: RequestHead | None = None) -> Exchange:
        return Exchange(self.gateway, self.outbox, self._reader.syntax, request, self.routes.operations)

    def _fail_last(self, exchange: Exchange, error: RequestError, status: int | None = None) -> None:
        """Answer with an error, after which the connection closes."""
        exchange.closes = True
        exchange.fail(error, status)

    def _fail_without_memory(self, error: MemoryError, exchange: Exchange) -> None:
        """Free what was read of a request for which memory ran out, and answer it; the connection ends."""
        error.__traceback__ = None  # its frames refer to what was read
        exchange.release()
        self._fail_last(exchange, internal_error(error, exchange.request_id, exchange.trace))

    async def _upgraded(self, exchange: Exchange) -> bool:
        """Serve a client that asks for a WebSocket; return whether it did."""
        if not wants_websocket(exchange):
            return False
        resource = self.routes.find(exchange.path)
        if resource is None or not resource.websocket:
            return False
        try:
            key = exchange.key = self.gateway.authorize(self.outbox, exchange.headers)
            if self.gateway.draining:
                raise Draining(SHUTS_DOWN)
            if not is_handshake(exchange):
                raise BadRequest("this is no WebSocket handshake of version 13")
            handshake = handshake_of(exchange, self._reader.trailing_bytes)
        except RequestError as error:
            self._fail_last(exchange, error)  # WebSocket frames may follow, so no next request can be found
        else:
            self._reader.more_unread = True
            await self.upgrade(handshake, exchange.request_id, key, exchange.caller)
        return True

    async def _respond(self, exchange: Exchange) -> None:
        if _has_two_lengths(exchange):
            exchange.closes = True  # a proxy in front may have read the body by the other length
        try:
            if self._answered_preflight(exchange):
                return
            resource = self.routes.find(exchange.path)
            self._admit(exchange, resource)
            handler, reads = _handler(exchange, resource)
            if reads:
                (exchange.key or self.gateway.keys.anonymous).charge()  # before refusals, which count, too
                exchange.check_media()
            body = Body(await self._reader.body(exchange))
            if reads:
                exchange.check_form(body)
        except RequestError as error:
            exchange.fail(error)
        except Unreadable as unreadable:
            exchange.fail(unreadable.error, unreadable.status)
        except MemoryError as error:
            self._fail_without_memory(error, exchange)
        else:
            self.busy = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._reader.watch, exchange, nursery.cancel_scope)
                await self._handle(handler, exchange, body)
                nursery.cancel_scope.cancel(reason="answered")
        if self.outbox.client_gone:
            raise ClientLeft

    def _answered_preflight(self, exchange: Exchange) -> bool:
        """Answer a CORS preflight, which carries no key; return whether it was one."""
        if exchange.method != "OPTIONS":
            return False
        if (headers := self.gateway.origins.preflight_headers(exchange.headers)) is None:
            return False
        exchange.reply(204, headers, b"")
        return True

    def _admit(self, exchange: Exchange, resource: Resource | None) -> None:
        """Authorize the caller, and count its connection by its key; raises the `RequestError` that refuses it.

        A caller without a key is refused before it can find out which paths exist.
        """
        access = Access.KEY if resource is None else resource.access
        if access is Access.OPEN:
            self.gateway.admit_without_key(self.outbox, exchange.headers)
        else:
            exchange.set_key(self.gateway.authorize(self.outbox, exchange.headers, admin=access is Access.ADMIN))
        if _has_two_lengths(exchange):
            raise BadRequest("the body has two lengths: send content-length or transfer-encoding")

    async def _handle(self, handler: Handler, exchange: Exchange, body: Body) -> None:
        try:
            try:
                await handler(exchange, body)
            except RequestError as error:
                exchange.fail(error)
            except trio.BrokenResourceError:
                raise
            except MemoryError as error:
                self._fail_without_memory(error, exchange)
            except Exception as bug:  # noqa: BLE001  # `internal_error` logs it
                exchange.fail(internal_error(bug, exchange.request_id, exchange.trace))
        except (trio.BrokenResourceError, SlowClient):
            self._reader.syntax.send_failed()  # the client is gone
            exchange.settle(lost=True)
        finally:
            exchange.settle()


def _handler(exchange: Exchange, resource: Resource | None) -> tuple[Handler, bool]:
    """Return the handler of a request, and whether it reads a JSON body; raises `NotFound` or `MethodNotAllowed`."""
    if resource is None:
        raise NotFound(f"there is nothing at {exchange.path[:200]}")
    exchange.allow = resource.allow
    if exchange.method == "OPTIONS":
        return options, False
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if (route := resource.routes.get(method)) is None:
        raise MethodNotAllowed(f"{exchange.path} knows {resource.allow.decode()} only")
    exchange.probe = route.probe
    return route.handler, route.operation.request is not None


def _has_two_lengths(exchange: Exchange) -> bool:
    return bool(exchange.header(b"transfer-encoding") and exchange.header(b"content-length"))
