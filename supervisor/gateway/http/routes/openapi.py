"""What can be asked here and what comes back, for programs that want to know."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import trio

from protocol.openapi.document import document
from supervisor.gateway.http.exchange import JSON, Exchange
from supervisor.gateway.http.routes.route import noted
from supervisor.version import version


async def openapi(exchange: Exchange, _: bytes) -> None:
    """Tell everything that the HTTP doors take and answer, as an OpenAPI document."""
    await trio.lowlevel.checkpoint()
    door = exchange.door
    exchange.reply(200, [JSON], _body(tuple(sorted(door.asking.served)), keys_wanted=door.keys.wanted))
    noted(exchange)


@lru_cache(maxsize=4)
def _body(models: tuple[str, ...], *, keys_wanted: bool) -> bytes:
    """Return the document as it is sent; it changes with the configuration alone."""
    return msgspec.json.encode(document(version(), models=models, keys_wanted=keys_wanted))
