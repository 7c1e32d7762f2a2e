"""The export of spans: their encoding, their sampling, the bounds of the queue, and a collector that is down."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from itertools import count

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.spans import Attribute, Span, SpanKind
from protocol.trace import Trace, child_span
from supervisor.telemetry import spans as module
from supervisor.telemetry.metrics import Metrics
from supervisor.telemetry.spans import SpanExport, export
from tests.rig.collector import Collector, collecting

ID, SPAN, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "0123456789abcdef" * 2
TRACE = child_span(Trace(ID, SPAN, state="a=b"), OWN)
NOON = 1_700_000_000.0


def made(
    url: str, *, spans_max: int = 8, ratio: float = 1.0, headers: str = "", **how: Callable[..., None]
) -> SpanExport:
    numbers, resource = count(1), {"service.name": "espalier", "service.instance.id": "front/1"}
    writer = export(f"{url}/v1/traces", resource, headers, spans_max, **how)
    return SpanExport(writer, lambda: f"{next(numbers):032x}", lambda: NOON + trio.current_time(), ratio)


def lost(export: SpanExport) -> tuple[int, int]:
    """Return the number of recorded spans, and of lost ones."""
    return export.recorded, export.writer.lost_items


async def sent(collector: Collector, *spans: Span) -> None:
    exporter = made(collector.url, headers="api-key=a%20b, x=1")
    for span in spans:
        exporter.record(span)
    exporter.flush(10.0)


@pytest.mark.realtime
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_collector_gets_all_of_a_span(autojump_clock: MockClock, host: str) -> None:
    attributes: dict[str, Attribute] = {
        "a": "x" * 1000,
        "b": 3,
        "c": 0.5,
        "d": True,
        "e": ["f", "g"],
        "h": None,
        "i": [1.0] * 100,
    }
    with collecting(host) as collector:
        await sent(
            collector,
            Span(TRACE, "chat tiny", 1.0, 2.5, attributes, SpanKind.SERVER),
            Span(child_span(TRACE, OWN[::-1]), "queue", 1.5, 1.0, error="overloaded"),
            Span(evolve(TRACE, sampled=False), "nothing", 1.0, 2.0),
        )
    first, second = collector.spans
    assert (first.trace, first.span, first.parent) == (ID, TRACE.span, SPAN)
    assert (first.name, first.kind, first.error) == ("chat tiny", SpanKind.SERVER, "")
    assert (first.began_ns, first.ended_ns) == (int((NOON + 1.0) * 1e9), int((NOON + 2.5) * 1e9))
    short = {**attributes, "a": "x" * 256, "i": [1.0] * 32}
    assert first.attributes == {name: value for name, value in short.items() if value is not None}
    assert first.resource == {"service.name": "espalier", "service.instance.id": "front/1"}
    assert (second.parent, second.error, second.attributes) == (first.span, "overloaded", {"error.type": "overloaded"})
    assert second.ended_ns == second.began_ns, "a span does not end before it begins"
    (headers, *_) = collector.requests
    assert (headers["api-key"], headers["x"], headers["content-type"]) == ("a b", "1", "application/x-protobuf")


async def test_a_share_of_the_traces_that_begin_here_is_sampled_and_nothing_decides_for_a_client() -> None:
    some, none = made("http://collector", ratio=0.25), made("http://collector", ratio=0.0)
    every = made("http://collector")
    roots = [some.root(f"{number << 56:032x}"[-32:].replace("0" * 32, OWN)) for number in range(1, 256)]
    assert sum(root.sampled for root in roots) == 63
    drawn = f"{2**64 - 1:032x}"
    assert (every.root(drawn).sampled, none.root(drawn).sampled, none.root("0" * 31 + "1").sampled) == (
        True,
        False,
        False,
    )
    assert none.child(TRACE) is not None
    assert every.child(evolve(TRACE, sampled=False)) is None
    assert every.child(None) is None


async def test_spans_without_room_are_dropped_and_counted() -> None:
    exporter, metrics = made("http://collector", spans_max=3, start=lambda _: None), Metrics()
    exporter.add_metrics(metrics.registry)
    for _ in range(5):
        exporter.record(Span(TRACE, "queue", 1.0, 2.0))
    assert lost(exporter) == (5, 2)
    text = metrics.render({}).decode()
    assert "espalier_spans_total 5.0" in text
    assert "espalier_spans_dropped_total 2.0" in text


@pytest.mark.realtime
async def test_a_collector_that_refuses_costs_spans_and_two_lines_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    with collecting() as collector:
        exporter = made(collector.url)
        for status in (503, 503, 200, 200):
            collector.status = status
            exporter.record(Span(TRACE, "queue", 1.0, 2.0))
            exporter.flush(10.0)
    assert lost(exporter) == (4, 2)
    assert len(collector.spans) == 2
    assert [record.message for record in caplog.records] == [
        "spans are lost: the collector does not take them",
        "spans are exported again",
    ]


@pytest.mark.realtime
async def test_a_collector_that_does_not_answer_holds_up_the_end_for_the_given_time_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = made(f"http://127.0.0.1:{silent.getsockname()[1]}")
        exporter.record(Span(TRACE, "queue", 1.0, 2.0))
        began = time.monotonic()
        exporter.flush(0.2)
        assert 0.1 < time.monotonic() - began < 2.0
