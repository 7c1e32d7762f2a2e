"""The routes of the operations of engines, one for each method of a row that has a path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import trio

from actors.kit.spans import Attribute, Span, SpanKind
from protocol.dialects.operations import Outcomes, failure, failure_body, outcomes_body, parse
from protocol.errors import BadRequest, Forbidden, RequestError
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation
from protocol.messages.operations import OPERATIONS
from protocol.openapi.document import PLAIN_TEXT, Operation, json_body
from protocol.openapi.request_schemas import Schema
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON, TEXT
from supervisor.gateway.http.routes.route import HttpRoute, log_answered

ENGINE_PARAMETER: Schema = {
    "name": "engine",
    "in": "query",
    "schema": {"type": "string"},
    "description": "The one engine that is asked, by its name in `/server_info`.",
}

OUTCOMES: Schema = {"type": "object", "additionalProperties": {"type": "object"}}


def routes() -> Iterator[HttpRoute]:
    """Yield the routes of all operations."""
    for row in OPERATIONS:
        if row.path is not None:
            for method in row.methods:
                yield HttpRoute(_described(row, method, row.path), partial(operate, row))


def _described(row: EngineOperation, method: str, path: str) -> Operation:
    """Return an operation of an engine as one of the HTTP interface."""
    return Operation(
        method,
        path,
        row.summary,
        PLAIN_TEXT if row.answer_text else json_body(OUTCOMES),
        row.request if row.has_fields and not row.takes_file else None,
        row.example,
        errors=(404,),
        parameters=(ENGINE_PARAMETER,),
        access=row.access,
        takes_file=row.takes_file,
    )


async def operate(row: EngineOperation, exchange: Exchange, body: Body) -> None:
    """Have engines carry out an operation; raises `Forbidden` for a page of another site.

    If one engine has failed, the answer is one error for all engines, with the outcome of each.
    """
    refuse_other_sites(exchange)
    await trio.lowlevel.checkpoint()
    outcomes: Outcomes = {}
    engine = _engine(exchange)
    if exchange.request.method != "HEAD":
        request = await exchange.read(partial(_parsed, row), body) if row.has_fields else row.request()
        outcomes = await exchange.gateway.administration.operate(request, engine)
        _record(row, exchange, outcomes)
    if (error := failure(row, outcomes)) is not None:
        exchange.response.fail(error, body=None if row.answer_text else failure_body(error, outcomes))
        return
    if row.answer_text:
        exchange.response.reply(200, [TEXT], row.answer_text.encode())
    else:
        exchange.response.reply(200, [JSON], outcomes_body(outcomes))
    log_answered(exchange)


def _record(row: EngineOperation, exchange: Exchange, outcomes: Outcomes) -> None:
    """Record the span of an operation, with the engines that were asked and the codes of their errors."""
    spans, trace, error = exchange.gateway.runtime.spans, exchange.request.trace, failure(row, outcomes)
    if trace is None or not spans.takes(trace):
        return
    codes = [outcome.code if isinstance(outcome, RequestError) else "ended" for outcome in outcomes.values()]
    attributes: dict[str, Attribute] = {"espalier.engines": [*outcomes], "espalier.outcomes": codes}
    times, code = (exchange.request.received_at, trio.current_time()), "" if error is None else error.code
    spans.record(Span(trace, row.name, *times, attributes, SpanKind.SERVER, code))


def _engine(exchange: Exchange) -> str | None:
    """Return the one engine that is asked, None for all; raises `BadRequest` for a query that may mean another one."""
    engine, names = exchange.request.query("engine"), exchange.request.query_names
    if unknown := sorted(names - {"engine"}):
        raise BadRequest(f"there is no query parameter {unknown[0]!r:.64}; there is engine")
    if names and not engine:
        raise BadRequest("name an engine, or leave the parameter out for all of them", param="engine")
    return engine


def _parsed(row: EngineOperation, raw: bytes) -> Message:
    """Return a request from its body; without a body, the one whose fields have their defaults."""
    return parse(row, raw or (b"" if row.takes_file else b"{}"))


def refuse_other_sites(exchange: Exchange) -> None:
    """Raise `Forbidden` for a request from a page of another site."""
    if exchange.request.header(b"sec-fetch-site") not in {b"", b"none", b"same-origin"}:
        # A browser sends no origin with the GET of an image.
        raise Forbidden("a page of another site may not do this")
