"""The spans of a request at its gateway, made from its record once it has ended.

Their names and attributes are those of OpenTelemetry's conventions for generative AI; others begin with `espalier.`. No
attribute has a word of a prompt or an answer.
"""

from __future__ import annotations

from actors.kit.spans import Attribute, Span, SpanKind, Spans
from protocol.errors import RequestError
from protocol.trace import Trace
from supervisor.gateway.request_record import RequestRecord

OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings", "rerank": "rerank", "score": "score"}
"""The operations by our APIs, of which the conventions know the first two; every other API is a `chat`."""

SERVER_FAULT = 500
"""The least HTTP status of an error of this server's: by the conventions, others leave its span without an error."""


def record_spans(
    record: RequestRecord, spans: Spans, outcome: str, error: RequestError | None, duration_s: float
) -> None:
    """Record the span of an ended request, and below it those of its wait for admission and of its preparation."""
    trace = record.trace
    if trace is None or not trace.sampled:
        return
    began_at, ended_at, code = (
        record.received_at,
        record.received_at + duration_s,
        outcome if error is None else error.code,
    )
    at_fault = error is not None and error.http_status >= SERVER_FAULT
    attributes = _attributes(record, outcome)
    name = f"{attributes['gen_ai.operation.name']} {record.model}"
    spans.record(Span(trace, name, began_at, ended_at, attributes, SpanKind.SERVER, code if at_fault else ""))
    _record_step(spans, trace, "queue", began_at, record.admitted_at, ended_at, code)
    # The actor of vectors and scores prepares its texts between the calls of embedders, so it has no such step.
    if record.admitted_at is not None and not record.items:
        tokens: dict[str, Attribute] = {"espalier.prompt.reused_tokens": record.reused_tokens}
        _record_step(spans, trace, "prepare", record.admitted_at, record.prepared_at, ended_at, code, tokens)


def _attributes(record: RequestRecord, outcome: str) -> dict[str, Attribute]:
    usage, first_s, route = record.usage, record.seconds_to(record.first_at), record.route
    return {
        "gen_ai.operation.name": OPERATIONS.get(record.api, "chat"),
        "gen_ai.provider.name": "espalier",
        "gen_ai.request.model": record.model,
        "gen_ai.response.finish_reasons": None if record.reason is None else (record.reason.value,),
        "gen_ai.response.time_to_first_chunk": first_s,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "espalier.request.id": record.request_id,
        "espalier.api": record.api,
        "espalier.key": None if record.key is None else record.key.name,
        "espalier.outcome": outcome,
        "espalier.items": record.items or None,
        "espalier.worker": None if route is None else route.workers,
    }


def _record_step(
    spans: Spans,
    before: Trace,
    name: str,
    began_at: float,
    passed_at: float | None,
    ended_at: float,
    code: str,
    attributes: dict[str, Attribute] | None = None,
) -> None:
    """Record one step of a request, which ended with the request if it never passed."""
    if (trace := spans.child(before)) is not None:
        if passed_at is None:
            spans.record(Span(trace, name, began_at, ended_at, error=code))
        else:
            spans.record(Span(trace, name, began_at, passed_at, attributes or {}))
