"""Routes about the server: its state and its models."""

from __future__ import annotations

import msgspec
import trio

from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered

# Fields of `GET /server_info` that name nodes and engines, or show limits by which clients would press each other.
FOR_OPERATORS = frozenset({"engines", "ejected", "limits"})


async def server_info(exchange: Exchange, _: Body) -> None:
    """Answer with the version and the models, and for an operator with the engines and the limits at this moment."""
    await trio.lowlevel.checkpoint()
    gateway = exchange.gateway
    info = gateway.administration.server_info() | {"limits": msgspec.to_builtins(gateway.limits)}
    if not gateway.keys.administers(exchange.request.key):
        info = {name: value for name, value in info.items() if name not in FOR_OPERATORS}
    exchange.response.reply(200, [JSON], msgspec.json.encode(info))
    log_answered(exchange)


async def model_info(exchange: Exchange, _: Body) -> None:
    """Answer with the model that the query names, or the only one; raises `ModelNotFound` or `BadRequest`."""
    await trio.lowlevel.checkpoint()
    model = exchange.gateway.runner.find_or_only(exchange.request.query("model") or None).model()
    info = {
        "model_path": model.root,
        "tokenizer_path": model.root,
        "is_generation": model.task == "generate",
        "task": model.task,
        "served_model_name": model.id,
        "max_model_len": model.max_model_len,
        "honours_seed": model.honours_seed,
    }
    exchange.response.reply(200, [JSON], msgspec.json.encode(info))
    log_answered(exchange)
