"""What load balancers and scrapers ask: whether it lives, whether it can serve, and its numbers."""

from __future__ import annotations

import trio

from protocol.errors import Draining, NotReady
from supervisor.gateway.http.exchange import TEXT, Exchange
from supervisor.gateway.http.routes.route import log_answered

METRICS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


async def health(exchange: Exchange, _: bytes) -> None:
    """Say that the process lives."""
    await trio.lowlevel.checkpoint()
    exchange.reply(200, [TEXT], b"alive\n")
    log_answered(exchange)


async def ready(exchange: Exchange, _: bytes) -> None:
    """Say whether requests can be served now; raises `Draining` or `NotReady` if not."""
    await trio.lowlevel.checkpoint()
    if exchange.gateway.gate.draining:
        raise Draining("the server is shutting down")
    if (why := exchange.gateway.unready()) is not None:
        raise NotReady(why)
    exchange.reply(200, [TEXT], b"ready\n")
    log_answered(exchange)


async def metrics(exchange: Exchange, _: bytes) -> None:
    """Say the numbers, in the text format of Prometheus."""
    exchange.reply(200, [METRICS], await exchange.gateway.metrics_text())
    log_answered(exchange)
