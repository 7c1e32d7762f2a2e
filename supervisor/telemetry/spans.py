"""The export of spans to a collector, by OTLP over HTTP with protobuf.

The event loop encodes a span when it has ended, in some 10 µs, and puts it into a bounded queue. A thread sends what is
queued, once a second at most (`QueuedWriter`). So a collector that is slow or down costs nothing but spans. Spans
without room, and spans of a failed request, are dropped and counted. The log has a line when losses begin, and a line
when they are over.

OpenTelemetry's SDK is not used here: it takes 80 to 130 µs to encode a span, drops spans without a count, and has a
shutdown without a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http.client import HTTPException
from urllib.parse import unquote
from urllib.request import Request, urlopen

import trio
from attrs import define, evolve

from actors.kit.spans import Span, Spans
from protocol.trace import Trace, child_span
from supervisor.telemetry import otlp
from supervisor.telemetry.registry import Registry
from supervisor.threads.queued_writer import QueuedWriter, Sink, start_daemon_thread

log = logging.getLogger(__name__)

SPAN_BYTES_MAX = 4096  # of a queued span, for the queue's limit in bytes
REQUEST_BYTES = 256 * 1024  # of spans in one request to the collector
PAUSE_S = 1.0  # between two requests
POST_S = 5.0  # the time for one


@define(eq=False)
class SpanExport(Spans):
    """Records the spans of sampled traces in a queue, from which a thread exports them.

    Of the traces that begin here, the share `ratio` is sampled, by their ids; a client decides for its own.
    """

    writer: QueuedWriter
    new_id: Callable[[], str]
    now: Callable[[], float]  # in seconds since 1970
    ratio: float = 1.0
    recorded: int = 0

    def root(self, drawn: str) -> Trace:
        """Return the first span of a new trace, sampled or not."""
        return evolve(child_span(None, drawn), sampled=int(drawn[16:], 16) < self.ratio * 2**64)

    def takes(self, trace: Trace | None) -> bool:
        """Whether a trace is sampled."""
        return trace is not None and trace.sampled

    def child(self, before: Trace | None) -> Trace | None:
        """Return the next span of a sampled trace."""
        return None if before is None or not before.sampled else child_span(before, self.new_id())

    def record(self, span: Span) -> None:
        """Queue an ended span; one without room is dropped and counted."""
        if span.trace.sampled:
            self.recorded += 1
            self.writer.put(otlp.span_bytes(span, self.now() - trio.current_time()))

    def flush(self, within_s: float) -> None:
        """Block until the queue is empty, for at most `within_s`."""
        self.writer.flush(within_s)

    def add_metrics(self, registry: Registry) -> None:
        """Define the counters of spans."""
        registry.add_counter("espalier_spans", "Spans that ended here", "", lambda: [((), float(self.recorded))])
        registry.add_counter(
            "espalier_spans_dropped", "Spans that no collector took", "", lambda: [((), float(self.writer.lost_items))]
        )


def export(
    endpoint: str,
    resource: Mapping[str, str],
    headers: str,
    spans_max: int,
    start: Callable[[Callable[[], None]], None] = start_daemon_thread,
) -> QueuedWriter:
    """Return a queue of at most `spans_max` spans, and the thread that sends them to the collector at `endpoint`.

    `headers` is the value of the variable `HEADERS`.
    """
    return QueuedWriter(
        _sink(endpoint, resource, _headers(headers)),
        items_max=spans_max,
        bytes_max=spans_max * SPAN_BYTES_MAX,
        notice=lambda _items, _bytes: b"",
        on_failure=_report,
        start=start,
        chunk_bytes=REQUEST_BYTES,
        pause_s=PAUSE_S,
    )


def _sink(endpoint: str, resource: Mapping[str, str], headers: Mapping[str, str]) -> Sink:
    def send(spans: bytes) -> None:
        if not spans:
            return  # a notice of dropped ones alone
        body = otlp.request_bytes(resource, "espalier", spans)
        request = Request(endpoint, body, dict(headers), method="POST")  # noqa: S310
        try:
            with urlopen(request, timeout=POST_S) as response:  # noqa: S310  # `--check` takes http and https alone
                response.read()
        except HTTPException as error:
            raise OSError(f"its answer is no HTTP: {type(error).__name__}") from error

    return send


def _headers(given: str) -> dict[str, str]:
    """Return the headers of a request to the collector."""
    pairs = (pair.partition("=") for pair in given.split(",") if "=" in pair)
    further = {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}
    return {**further, "Content-Type": "application/x-protobuf", "User-Agent": "espalier"}


def _report(error: OSError | ValueError | None) -> None:
    """Log the beginning of losses, or their end."""
    if error is None:
        log.info("spans are exported again")
    else:
        log.warning("spans are lost: the collector does not take them", extra={"reason": str(error)})
