"""Without `[tracing]`, the port of spans records nothing and changes no trace."""

from __future__ import annotations

from actors.kit.spans import Span, Spans
from protocol.trace import Trace, child_span

DRAWN = "0123456789abcdef" * 2


def test_a_port_that_records_nothing_makes_no_children() -> None:
    spans, trace = Spans(), Trace(DRAWN, DRAWN[16:])
    assert spans.root(DRAWN) == trace == child_span(None, DRAWN)
    assert spans.child(trace) is None
    assert spans.child(None) is None
    assert not spans.takes(trace)
    spans.record(Span(trace, "generate", 1.0, 2.0))
    spans.flush(0.0)
