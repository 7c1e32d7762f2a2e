"""The table of HTTP routes: one row for each method of a path.

The rest of the gateway reads only the row of a route, so a new route takes its handler's file, its dialect in
`protocol`, and its row. The connection reads who may call and whether there is a body; the OpenAPI document describes
it, the fuzzer attacks it, and the access log reads whether it is a probe. No path stands in a second table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio
from attrs import define, evolve, field, frozen

from protocol.access import Access
from protocol.openapi.document import Operation
from supervisor.gateway.http.exchange import Body, Exchange

Handler = Callable[[Exchange, Body], Awaitable[None]]
"""Answers a request with its whole body, or raises the `RequestError` with which it is answered."""

ASTERISK = "*"  # the server as a whole, in the request line of an OPTIONS (RFC 9112, section 3.2.4)


@frozen(eq=False)
class HttpRoute:
    """One row: a method of a path, and its handler."""

    operation: Operation
    handler: Handler
    # Called by monitors every few seconds: it is logged at debug level only, and answered whatever the `Host`.
    probe: bool = False
    websocket: bool = False  # it can be upgraded to a WebSocket of Responses events
    aliases: tuple[str, ...] = ()  # other paths of the same operation


@frozen(eq=False)
class Resource:
    """All routes of one path."""

    routes: dict[str, HttpRoute] = field(factory=dict)  # by method
    access: Access = Access.KEY
    allow: bytes = b""  # the methods of the path, as the header `allow` lists them
    probe: bool = False  # all its routes are

    @property
    def websocket(self) -> bool:
        """Whether a GET of this path can be upgraded to a WebSocket."""
        return "GET" in self.routes and self.routes["GET"].websocket


@define(eq=False)
class RouteTable:
    """Every route of a server, found by the path of a request.

    A path is matched exactly, or up to its parameter if its last segment is one. Raises `ValueError` if two routes of
    one path differ in who may call them: callers are authorized before their method is looked up.
    """

    routes: tuple[HttpRoute, ...] = field(converter=tuple[HttpRoute, ...])
    server_wide: bool = True  # whether `OPTIONS *` is answered
    operations: tuple[Operation, ...] = field(init=False)  # in the order of the rows, aliases included
    _resources: dict[str, Resource] = field(init=False, factory=dict)
    _prefixes: dict[str, Resource] = field(init=False, factory=dict)  # of paths that end in a parameter

    def __attrs_post_init__(self) -> None:
        self.operations = tuple(
            evolve(route.operation, path=path)
            for route in self.routes
            for path in (route.operation.path, *route.aliases)
        )
        by_path: dict[str, list[HttpRoute]] = {}
        for route in self.routes:
            by_path.setdefault(route.operation.path, []).append(route)
        for path, routes in by_path.items():
            resource = _resource(path, routes)
            if path.endswith("}"):
                self._prefixes[path[: path.rindex("{")]] = resource
            for name in (path, *routes[0].aliases):
                self._resources[name] = resource
        if self.server_wide:
            methods = dict.fromkeys(route.operation.method for route in self.routes)
            self._resources[ASTERISK] = Resource(allow=_allow(methods))

    def find(self, path: str) -> Resource | None:
        """Return the routes of a path, None if there are none."""
        for prefix, resource in self._prefixes.items():
            if path.startswith(prefix):
                return resource
        return self._resources.get(path)

    def probes(self) -> RouteTable:
        """Return a table of the routes for monitors only."""
        return RouteTable([route for route in self.routes if route.probe], server_wide=False)


def _resource(path: str, routes: list[HttpRoute]) -> Resource:
    access = {route.operation.access for route in routes}
    if len(access) > 1:
        raise ValueError(f"the routes of {path} differ in who may call them: {', '.join(sorted(access))}")
    methods = {route.operation.method: route for route in routes}
    return Resource(methods, access.pop(), _allow(methods), all(route.probe for route in routes))


def _allow(methods: Iterable[str]) -> bytes:
    """Return the methods of a path as the header `allow` lists them: a GET implies HEAD, and OPTIONS always works."""
    names = [name for method in methods for name in (("GET", "HEAD") if method == "GET" else (method,))]
    return ", ".join([*names, "OPTIONS"]).encode()


async def options(exchange: Exchange, _: Body) -> None:
    """Answer with the methods of a path."""
    await trio.lowlevel.checkpoint()
    exchange.response.reply(204, [(b"allow", exchange.request.allow)], b"")


def log_answered(exchange: Exchange) -> None:
    """Log a request that was answered without a model."""
    exchange.gateway.access_log.log_answered(
        exchange.request.id,
        exchange.request.line,
        200,
        exchange.request.key,
        exchange.request.received_at,
        exchange.request.trace,
        probe=exchange.request.probe,
    )
