"""The list of served models, as in OpenAI's API."""

from __future__ import annotations

from urllib.parse import unquote

import trio

from protocol.dialects import http as shapes
from protocol.openapi.request_schemas import Schema
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered

PREFIX = "/v1/models/"
PATH_PARAMETER: Schema = {
    "name": "model",
    "required": True,
    "in": "path",
    "schema": {"type": "string", "minLength": 1},
    "description": "The id of a model in the list of models.",
}
QUERY_PARAMETER: Schema = {
    "name": "model",
    "in": "query",
    "schema": {"type": "string"},
    "description": "The name of a model; required if several are served. An empty value counts as none.",
}


async def list_models(exchange: Exchange, _: Body) -> None:
    """Answer with every model."""
    await trio.lowlevel.checkpoint()
    models = [model for served in exchange.gateway.runner.served.values() for model in served.models()]
    exchange.response.reply(200, [JSON], shapes.models_body(models))
    log_answered(exchange)


async def get_model(exchange: Exchange, _: Body) -> None:
    """Answer with one model; raises `ModelNotFound`."""
    await trio.lowlevel.checkpoint()
    served = exchange.gateway.runner.find(unquote(exchange.request.path.removeprefix(PREFIX)))
    exchange.response.reply(200, [JSON], shapes.model_body(served.model()))
    log_answered(exchange)
