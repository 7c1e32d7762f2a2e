"""Routes about the server: its state and its models."""

from __future__ import annotations

import msgspec
import trio

from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered


async def server_info(exchange: Exchange, _: Body) -> None:
    """Answer with the version, the models, the engines and the limits at this moment."""
    await trio.lowlevel.checkpoint()
    gateway = exchange.gateway
    exchange.response.reply(
        200,
        [JSON],
        msgspec.json.encode(gateway.administration.server_info() | {"limits": msgspec.to_builtins(gateway.limits)}),
    )
    log_answered(exchange)


async def model_info(exchange: Exchange, _: Body) -> None:
    """Answer with the model that the query names, or the only one; raises `ModelNotFound` or `BadRequest`."""
    await trio.lowlevel.checkpoint()
    model = exchange.gateway.runner.find_or_only(exchange.request.query("model") or None).model()
    info = {
        "model_path": model.root,
        "tokenizer_path": model.root,
        "is_generation": True,
        "served_model_name": model.id,
        "max_model_len": model.max_model_len,
        "honours_seed": model.honours_seed,
    }
    exchange.response.reply(200, [JSON], msgspec.json.encode(info))
    log_answered(exchange)
