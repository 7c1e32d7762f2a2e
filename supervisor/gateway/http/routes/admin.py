"""Routes about the server: its state, its models, and flushing of prefix caches."""

from __future__ import annotations

import msgspec
import trio

from protocol.errors import Forbidden
from supervisor.gateway.http.exchange import JSON, TEXT, Body, Exchange
from supervisor.gateway.http.routes.route import log_answered


async def server_info(exchange: Exchange, _: Body) -> None:
    """Answer with the version, the models, the engines and the limits at this moment."""
    await trio.lowlevel.checkpoint()
    gateway = exchange.gateway
    exchange.reply(
        200, [JSON], msgspec.json.encode(gateway.server_info() | {"limits": msgspec.to_builtins(gateway.limits)})
    )
    log_answered(exchange)


async def model_info(exchange: Exchange, _: Body) -> None:
    """Answer with the model that the query names, or the only one; raises `ModelNotFound` or `BadRequest`."""
    await trio.lowlevel.checkpoint()
    model = exchange.gateway.runner.find_or_only(exchange.query("model") or None).model()
    info = {
        "model_path": model.root,
        "tokenizer_path": model.root,
        "is_generation": True,
        "served_model_name": model.id,
        "max_model_len": model.max_model_len,
        "honours_seed": model.honours_seed,
    }
    exchange.reply(200, [JSON], msgspec.json.encode(info))
    log_answered(exchange)


async def flush_cache(exchange: Exchange, _: Body) -> None:
    """Flush the prefix cache of every engine; raises `Forbidden` for a page of another site."""
    if exchange.header(b"sec-fetch-site") not in {b"", b"none", b"same-origin"}:
        raise Forbidden("a page of another site may not do this")  # a browser sends no origin with the GET of an image
    await trio.lowlevel.checkpoint()
    if exchange.method != "HEAD":
        await exchange.gateway.flush_cache()
    exchange.reply(200, [TEXT], b"Cache flushed.\n")
    log_answered(exchange)
