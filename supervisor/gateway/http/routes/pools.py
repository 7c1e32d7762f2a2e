"""The pools of engines, and the grids that map requests to them."""

from __future__ import annotations

import msgspec
import trio

from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered


async def pools(exchange: Exchange, _: Body) -> None:
    """Answer with each pool at this moment and with each grid; both lists are empty where there are none."""
    await trio.lowlevel.checkpoint()
    exchange.response.reply(200, [JSON], msgspec.json.encode(exchange.gateway.administration.pools()))
    log_answered(exchange)
