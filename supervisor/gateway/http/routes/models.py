"""The models that are served here, in OpenAI's shape."""

from __future__ import annotations

from urllib.parse import unquote

import trio

from protocol.dialects import http as shapes
from supervisor.gateway.http.exchange import JSON, Exchange
from supervisor.gateway.http.routes.route import noted

PREFIX = "/v1/models/"


async def listed(exchange: Exchange, _: bytes) -> None:
    """List every model."""
    await trio.lowlevel.checkpoint()
    models = [served.model() for served in exchange.door.asking.served.values()]
    exchange.reply(200, [JSON], shapes.models_body(models))
    noted(exchange)


async def one(exchange: Exchange, _: bytes) -> None:
    """Tell about one model; raises `ModelNotFound`."""
    await trio.lowlevel.checkpoint()
    served = exchange.door.asking.find(unquote(exchange.path.removeprefix(PREFIX)))
    exchange.reply(200, [JSON], shapes.model_body(served.model()))
    noted(exchange)
