"""Probes: liveness, readiness and metrics."""

from __future__ import annotations

import trio

from protocol.errors import Draining, NotReady
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import TEXT
from supervisor.gateway.http.routes.route import log_answered

METRICS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


async def health(exchange: Exchange, _: Body) -> None:
    """Answer that the process is alive."""
    await trio.lowlevel.checkpoint()
    exchange.response.reply(200, [TEXT], b"alive\n")
    log_answered(exchange)


async def ready(exchange: Exchange, _: Body) -> None:
    """Answer whether requests can be served now, and any exceptions; raises `Draining` or `NotReady`."""
    await trio.lowlevel.checkpoint()
    if exchange.gateway.closes_connections:
        raise Draining("the server is shutting down")
    if (why := exchange.gateway.probes.unready()) is not None:
        raise NotReady(why)
    missing = exchange.gateway.probes.missing()
    if missing is not None and not exchange.gateway.keys.administers(exchange.request.key):
        missing = "some model takes no images and videos"
    exchange.response.reply(200, [TEXT], b"ready\n" if missing is None else f"ready, but {missing}\n".encode())
    log_answered(exchange)


async def metrics(exchange: Exchange, _: Body) -> None:
    """Answer with the metrics, in the text format of Prometheus."""
    exchange.response.reply(200, [METRICS], await exchange.gateway.probes.metrics_text())
    log_answered(exchange)
