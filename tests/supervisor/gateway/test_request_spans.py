"""Spans of requests at the gateway, by OpenTelemetry's names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.spans import SpanKind
from protocol.errors import EngineLost, NotReady, RequestError
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from supervisor.gateway.ports import NO_ADMINISTRATION
from tests.rig.embedded_texts import embedding_rig
from tests.rig.gateway import Rig, chat, create, gateway_rig, head, post, text
from tests.rig.sockets import websocket_client
from tests.rig.spans import KeptSpans

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{ID}-{SPAN}-01"


def kept(rig: Rig) -> KeptSpans:
    """Keep the spans of a gateway from now on."""
    spans = KeptSpans()
    rig.gateway.runner.spans = spans
    return spans


async def test_an_answer_is_a_span_of_the_convention_with_its_queue_and_its_preparation() -> None:
    async with gateway_rig() as rig:
        spans, client = kept(rig), await rig.client()
        await client.ask(post(chat("n=2"), traceparent=PARENT, x_request_id="mine"))
        await client.ask(text("n=2"))
    assert spans.tree(SPAN) == ["chat tiny", "  queue", "  prepare"]
    assert spans.tree(None) == ["text_completion tiny", "  queue", "  prepare"]
    (answer,) = spans.named("chat tiny")
    assert (answer.trace.id, answer.kind, answer.error) == (ID, SpanKind.SERVER, "")
    found = {name: answer.attributes[name] for name in sorted(answer.attributes) if name.startswith("gen_ai.")}
    assert found.pop("gen_ai.response.time_to_first_chunk") is not None
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "espalier",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.input_tokens": len(rig.worker.asked[0].tokens),
        "gen_ai.usage.output_tokens": 2,
    }
    assert answer.attributes["espalier.request.id"] == "mine"


async def test_vectors_and_scores_are_spans_by_their_own_names(rather_slow: MockClock) -> None:
    asked = {
        "/v1/embeddings": {"model": "vectors", "input": ["the oak", "elm"]},
        "/v1/rerank": {"model": "scores", "query": "oak", "documents": ["elm"]},
        "/v1/score": {"model": "scores", "text_1": "oak", "text_2": ["elm", "the"]},
    }
    async with embedding_rig() as each:
        spans, client = kept(each.rig), await each.rig.client()
        for path, body in asked.items():
            assert (await client.ask(post(body, path, traceparent=PARENT))).status == 200
    names = ["embeddings vectors", "rerank scores", "score scores"]
    assert spans.tree(SPAN) == [line for name in names for line in (name, "  queue")]
    assert [span.attributes["espalier.items"] for name in names for span in spans.named(name)] == [2, 1, 2]
    assert [span.attributes["gen_ai.operation.name"] for name in names for span in spans.named(name)] == [
        name.partition(" ")[0] for name in names
    ]
    assert {span.error for span in spans.all} == {""}


async def test_over_a_websocket_each_response_is_one() -> None:
    async with gateway_rig() as rig:
        spans, client = kept(rig), await websocket_client(rig, traceparent=PARENT)
        for _ in range(2):
            await client.say(create("n=2"))
            await client.events()
    assert spans.tree(SPAN) == ["chat tiny", "  queue", "  prepare"] * 2


async def test_an_error_of_the_server_is_one_of_the_span_and_a_clients_is_its_outcome() -> None:
    async with gateway_rig(admit_s=0.01) as rig:
        spans, client = kept(rig), await rig.client()
        rig.ready.append("no engine is up")
        assert (await client.ask(post(chat(), traceparent=PARENT))).status == 503
        rig.ready.clear()
        assert (await client.ask(post(chat("n=2", stop_token_ids=[10**6])))).status == 400
    refused, wrong = spans.named("chat tiny")
    assert (refused.error, refused.attributes["espalier.outcome"]) == ("not_ready", "not_ready")
    assert (wrong.error, wrong.attributes["espalier.outcome"]) == ("", "invalid_request")
    assert [(span.name, span.error) for span in spans.all if span.name in {"queue", "prepare"}] == [
        ("queue", "not_ready"),
        ("queue", ""),
        ("prepare", "invalid_request"),
    ]


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_the_client_decides_about_its_own_trace(flags: str) -> None:
    async with gateway_rig() as rig:
        spans, client = kept(rig), await rig.client()
        await client.ask(post(chat("n=2"), traceparent=f"00-{ID}-{SPAN}-{flags}"))
        assert (await client.ask(head())).status == 200
    assert bool(spans.all) is (flags == "01")


async def test_an_operation_is_a_span_with_the_outcome_of_each_engine() -> None:
    async def operate(_: Message, __: str | None) -> Mapping[str, Message | RequestError]:
        await trio.lowlevel.checkpoint()
        return {"one/a": Done(), "two/a": EngineLost("it died")}

    async with gateway_rig() as rig:
        spans, client = KeptSpans(), await rig.client()
        rig.gateway.administration = evolve(NO_ADMINISTRATION, operate=operate)
        rig.gateway.runtime = evolve(rig.gateway.runtime, spans=spans)
        await client.ask(head("POST", "/flush_cache", traceparent=PARENT, content_length=0))
        await client.ask(head("POST", "/flush_cache", traceparent=PARENT[:-2] + "00", content_length=0))
    (span,) = spans.all
    assert (span.name, span.trace.parent, span.error) == ("flush-cache", SPAN, NotReady.code)
    assert span.attributes == {"espalier.engines": ["one/a", "two/a"], "espalier.outcomes": ["ended", EngineLost.code]}
