"""Spans of requests: the port by which actors and the gateway report what each step of a traced request took.

A span is reported once, when its step has ended, and never for a single token. Ids come from the trace of the request
(`protocol/trace.py`): whoever asks somebody else makes a child of its own span, and passes that on. What becomes of a
span is the affair of the node: without `[tracing]` it is dropped here, at the cost of one call a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeAlias

import trio
from attrs import Factory, frozen

from protocol.errors import AskerLeft, RequestError
from protocol.trace import Trace, child_span

Attribute: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[float] | None
"""The value of an attribute; None is left out."""

ENDED = "ended"
"""The outcome of a call to a worker with a result; `left` and the codes of errors are the others."""


class SpanKind(IntEnum):
    """The relation of a span to others, with the numbers of OTLP."""

    INTERNAL = 1
    SERVER = 2  # it answers a request of another process
    CLIENT = 3  # it waits for the answer of one


@frozen
class Span:
    """One ended step of a request; its times are of `trio.current_time`.

    `error` is the code of the error that ended it, empty if it succeeded.
    """

    trace: Trace
    name: str
    began_at: float
    ended_at: float
    attributes: Mapping[str, Attribute] = Factory(dict)
    kind: SpanKind = SpanKind.INTERNAL
    error: str = ""


class Spans:
    """Receives the spans of sampled traces; this one records none."""

    def root(self, drawn: str) -> Trace:
        """Return the first span of a new trace, from a drawn id."""
        return child_span(None, drawn)

    def takes(self, trace: Trace | None) -> bool:  # noqa: ARG002
        """Whether the spans of a trace are recorded here."""
        return False

    def child(self, before: Trace | None) -> Trace | None:  # noqa: ARG002
        """Return the next span of a trace that is recorded here, None of any other."""
        return None

    def record(self, span: Span) -> None:
        """Record an ended span."""

    def flush(self, within_s: float) -> None:
        """Block until the recorded spans are exported, for at most `within_s`."""


@contextmanager
def asking(
    spans: Spans, before: Trace | None, new_id: Callable[[], str], name: str, worker: str
) -> Iterator[Trace | None]:
    """Yield the trace for a worker that is asked in the body, and record a span of how the body ended.

    If nothing is recorded here, and the client records its trace, the worker gets a span of its own all the same.
    """
    if (trace := spans.child(before)) is None:
        yield child_span(before, new_id()) if before is not None and before.followed else before
        return
    began_at, outcome, code = trio.current_time(), AskerLeft.code, ""
    try:
        yield spans.child(trace)
        outcome = ENDED
    except RequestError as error:
        outcome = code = error.code
        raise
    finally:
        attributes: dict[str, Attribute] = {"espalier.worker": worker, "espalier.outcome": outcome}
        spans.record(Span(trace, name, began_at, trio.current_time(), attributes, SpanKind.CLIENT, code))
