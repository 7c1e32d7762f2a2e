"""The route that returns a file left by an operation of an engine, such as a profile."""

from __future__ import annotations

from urllib.parse import unquote

from protocol.errors import BadRequest, InternalError, NotFound, RequestError
from protocol.messages.engine_files import FilePart, ReadFile
from protocol.openapi.request_schemas import Schema
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.routes.operations import refuse_other_sites
from supervisor.gateway.http.routes.route import log_answered

PREFIX = "/engine_files/"
FILE_PARAMETER: Schema = {
    "name": "name",
    "required": True,
    "in": "path",
    "schema": {"type": "string", "minLength": 1},
    "description": "The name of a file in the list of `/engine_files`.",
}
BINARY: dict[str, dict[str, object]] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


async def get_file(exchange: Exchange, _: Body) -> None:
    """Answer with a file of the engine that the query names, read part by part."""
    refuse_other_sites(exchange)
    name, engine = unquote(exchange.request.path.removeprefix(PREFIX)), exchange.request.query("engine")
    if not engine:
        raise BadRequest("a file is of one engine: name it", param="engine")

    async def read(offset: int) -> FilePart:
        outcomes = await exchange.gateway.administration.operate(ReadFile(name, offset), engine)
        (outcome,) = outcomes.values()
        if isinstance(outcome, BadRequest) and outcome.param == "name":
            raise NotFound(outcome.detail, param="name")
        if isinstance(outcome, RequestError):
            raise outcome
        if not isinstance(outcome, FilePart):
            raise InternalError("an engine answered with something else")
        return outcome

    async def data(offset: int) -> bytes:
        return (await read(offset)).data

    first = await read(0)
    headers = [(b"content-type", b"application/octet-stream")]
    await exchange.response.reply_in_parts(200, headers, first.size, first.data, data)
    log_answered(exchange)
