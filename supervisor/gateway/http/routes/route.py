"""One path: which methods it knows and who may use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio
from attrs import frozen

from supervisor.gateway.http.exchange import Exchange

Handler = Callable[[Exchange, bytes], Awaitable[None]]
"""Answers a request whose whole body is there; raises the `RequestError` that is its answer otherwise."""


@frozen
class Route:
    """What can be done at one path."""

    methods: Mapping[str, Handler]
    open: bool = False  # to callers without a key
    admin: bool = False  # to those alone who may look after the server
    reads: bool = False  # what is posted must be JSON
    known: bytes | None = None

    @property
    def allow(self) -> bytes:
        """The methods of this path, as the header `allow` lists them."""
        if self.known is not None:
            return self.known
        names = [name for method in self.methods for name in (("GET", "HEAD") if method == "GET" else (method,))]
        return ", ".join([*names, "OPTIONS"]).encode()


async def options(exchange: Exchange, _: bytes) -> None:
    """Say what can be done at a path."""
    await trio.lowlevel.checkpoint()
    exchange.reply(204, [(b"allow", exchange.allow)], b"")


def noted(exchange: Exchange) -> None:
    """Log a request that no model was asked for."""
    exchange.door.noted(exchange.request_id, exchange.what, 200, exchange.key, exchange.asked_at, exchange.trace)
