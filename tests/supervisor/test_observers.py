"""The spans of workers: from when a request had its slot, and none of a trace that is not sampled."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.spans import SpanKind, Spans
from protocol.errors import AskerLeft, EngineLost
from protocol.messages.embedding import Embed, TextItem
from protocol.messages.media import Encode
from protocol.token_ids import TokenIds
from protocol.trace import Trace
from supervisor.observers import EmbedderMetrics, EncoderMetrics, SlotMetrics
from supervisor.telemetry.metrics import Metrics
from tests.actors.routing.test_encoding import pixels
from tests.rig.router import generate
from tests.rig.spans import KeptSpans

TRACE = Trace("a" * 32, "b" * 16, "c" * 16)


@pytest.mark.parametrize(
    ("outcome", "error"), [("ended", ""), (AskerLeft.code, ""), (EngineLost.code, EngineLost.code)]
)
async def test_a_request_in_a_slot_is_a_span(autojump_clock: MockClock, outcome: str, error: str) -> None:
    spans = KeptSpans()
    observer, request = SlotMetrics(Metrics(), "one/a", spans), evolve(generate(tokens_max=4), trace=TRACE)
    await trio.sleep(3)
    assert observer.ended(request, outcome, trio.current_time() - 2, trio.current_time() - 1.5)
    (span,) = spans.all
    assert (span.trace, span.name, span.kind, span.error) == (TRACE, "compute", SpanKind.SERVER, error)
    assert span.ended_at - span.began_at == 2
    assert span.attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert (span.attributes["espalier.worker"], span.attributes["espalier.outcome"]) == ("one/a", outcome)


async def test_an_item_of_an_encoder_is_a_span(autojump_clock: MockClock) -> None:
    spans = KeptSpans()
    request = Encode("a" * 32, pixels(1), trace=TRACE)
    for outcome in ("cached", EngineLost.code):
        assert EncoderMetrics(Metrics(), "one/a", spans).ended(request, outcome, 0.0)
    assert [(span.error, span.attributes["espalier.modality"]) for span in spans.all] == [
        ("", "image"),
        (EngineLost.code, "image"),
    ]


async def test_a_request_of_an_embedder_is_a_span() -> None:
    spans = KeptSpans()
    request = Embed("a" * 32, (TextItem(TokenIds.of([1, 2])), TextItem(TokenIds.of([3]))), trace=TRACE)
    for outcome in ("ended", EngineLost.code):
        assert EmbedderMetrics(Metrics(), "one/a", spans).ended(request, outcome, 0.0)
    assert [(span.name, span.error) for span in spans.all] == [("compute", ""), ("compute", EngineLost.code)]
    assert [span.attributes["espalier.items"] for span in spans.all] == [2, 2]
    assert [span.attributes["gen_ai.usage.input_tokens"] for span in spans.all] == [3, 3]
    assert not EmbedderMetrics(Metrics(), "one/a").ended(request, "ended", 0.0)


async def test_without_an_export_or_a_sampled_trace_a_worker_has_none() -> None:
    unsampled = evolve(generate(), trace=evolve(TRACE, sampled=False))
    assert not SlotMetrics(Metrics(), "one/a", KeptSpans()).ended(unsampled, "ended", 0.0, None)
    assert not SlotMetrics(Metrics(), "one/a", KeptSpans()).ended(generate(), "ended", 0.0, None)
    assert not SlotMetrics(Metrics(), "one/a", Spans()).ended(evolve(generate(), trace=TRACE), "ended", 0.0, None)
