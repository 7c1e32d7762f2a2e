"""The route of the OpenAPI document, which describes all routes."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import trio

from protocol.openapi.document import Operation, document
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered
from supervisor.version import version


async def openapi(exchange: Exchange, _: Body) -> None:
    """Answer with the OpenAPI document."""
    await trio.lowlevel.checkpoint()
    gateway = exchange.gateway
    models = tuple(sorted(gateway.runner.served))
    exchange.response.reply(
        200, [JSON], _body(exchange.operations, models, gateway.leave_out_tools, keys_wanted=gateway.keys.wanted)
    )
    log_answered(exchange)


@lru_cache(maxsize=4)
def _body(
    operations: tuple[Operation, ...], models: tuple[str, ...], leave_out: frozenset[str], *, keys_wanted: bool
) -> bytes:
    """Return the encoded document; it changes with the configuration alone, so it is cached."""
    described = document(version(), operations, models=models, keys_wanted=keys_wanted, leave_out_tools=leave_out)
    return msgspec.json.encode(described)
