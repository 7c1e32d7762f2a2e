"""A collector of spans by OTLP over HTTP, in a thread of a test, at loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field, frozen
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@frozen
class Collected:
    """One span, as the collector got it."""

    trace: str
    span: str
    parent: str
    name: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    error: str
    resource: dict[str, Any]

    @property
    def process(self) -> str:
        """What exported it: a node, or the service of an engine."""
        instance = str(self.resource.get("service.instance.id", ""))
        return instance.partition("/")[0] if self.resource["service.name"] == "espalier" else "engine"


@define(eq=False)
class Collector:
    """A running collector, and the spans that it has got; it answers with `status`."""

    url: str
    status: int = 200
    requests: list[dict[str, str]] = field(factory=list)  # the headers of each
    spans: list[Collected] = field(factory=list)

    def of(self, trace: str) -> list[Collected]:
        """Return the spans of one trace."""
        return [span for span in tuple(self.spans) if span.trace == trace]

    def tree(self, trace: str, parent: str) -> list[str]:
        """Return the spans below another one in the order of their beginnings, each with its process, and indented."""
        lines = []
        for span in sorted(self.of(trace), key=lambda each: each.began_ns):
            if span.parent == parent:
                lines.append(f"{span.name} ({span.process})")
                lines += [f"  {line}" for line in self.tree(trace, span.span)]
        return lines


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _spans(message: ExportTraceServiceRequest) -> Iterator[Collected]:
    for of_resource in message.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                times = span.start_time_unix_nano, span.end_time_unix_nano
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                error = span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else ""
                yield Collected(*ids, span.name, span.kind, *times, _values(span.attributes), error, resource)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), handler)


@contextmanager
def collecting(host: str = "127.0.0.1") -> Iterator[Collector]:
    """Run a collector at a free port of a loopback address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = decompress(body)
            assert self.path == "/v1/traces"
            collector.requests.append({name.lower(): value for name, value in self.headers.items()})
            if collector.status == 200:
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(host, Handler)
    shown = f"[{host}]" if ":" in host else host
    collector = Collector(f"http://{shown}:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
