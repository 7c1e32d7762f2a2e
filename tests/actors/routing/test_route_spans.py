"""Spans of a request in its router: its choices with their costs, its legs, its hand-off, and what follows a loss."""

from __future__ import annotations

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.kit.spans import SpanKind
from protocol.errors import EngineLost, EngineRefused
from protocol.trace import Trace, child_span
from tests.rig import router
from tests.rig.router import Fake, Play, pair, routed
from tests.rig.spans import KeptSpans

ID, SPAN, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "0123456789abcdef" * 2
GATEWAY = child_span(Trace(ID, SPAN), OWN)


async def answered(*workers: Fake, trace: Trace | None = GATEWAY, tokens_max: int = 4) -> KeptSpans:
    """Answer one request by these workers, and return its spans."""
    spans = KeptSpans()
    async with routed(*workers) as running:
        running.routing.spans = spans
        await router.ask(running, evolve(router.generate(tokens_max=tokens_max), trace=trace))
    return spans


async def test_a_choice_has_the_costs_of_the_compared_workers_and_the_worker_gets_a_span_below_its_leg(
    autojump_clock: MockClock,
) -> None:
    idle, busy = Fake("a"), Fake("b", more=1)
    spans = await answered(idle, busy)
    assert spans.tree(GATEWAY.span) == ["route", "generate"]
    (route,), (leg,) = spans.named("route"), spans.named("generate")
    assert route.attributes["espalier.worker"] == "a"
    assert route.attributes["espalier.route.decode.workers"] == ["a", "b"]
    assert route.attributes["espalier.route.decode.costs"] == [0.0, 0.25]
    assert (leg.kind, leg.error, leg.ended_at - leg.began_at) == (SpanKind.CLIENT, "", 4.0)
    (asked,) = idle.asked
    assert asked.trace is not None
    assert (asked.trace.id, asked.trace.parent) == (ID, leg.trace.span)


async def test_a_pair_has_a_leg_each_and_their_hand_off(autojump_clock: MockClock) -> None:
    spans = await answered(*pair())
    assert sorted(spans.tree(GATEWAY.span)) == ["decode", "hand-off", "prefill", "route"]
    (route,) = spans.named("route")
    assert {name for name in route.attributes if name.endswith("costs")} == {
        "espalier.route.prefill.costs",
        "espalier.route.decode.costs",
    }


async def test_a_loss_is_an_error_of_its_leg_and_a_further_choice(autojump_clock: MockClock) -> None:
    spans = await answered(Fake("a", [Play(EngineLost("it died"), tokens=2)]), Fake("b"))
    assert spans.tree(GATEWAY.span) == ["route", "generate", "route", "generate"]
    lost, _ = spans.named("generate")
    assert (lost.error, lost.attributes["espalier.outcome"]) == (EngineLost.code, EngineLost.code)
    _, again = spans.named("route")
    known = {name: again.attributes[f"espalier.{name}"] for name in ("worker", "route.choice", "lost", "sent_tokens")}
    assert known == {"worker": "b", "route.choice": 2, "lost": EngineLost.code, "sent_tokens": 2}


async def test_a_second_opinion_is_a_further_choice(autojump_clock: MockClock) -> None:
    refusal = Play(EngineRefused("no"), tokens=0, started=False)
    spans = await answered(Fake("a", [refusal]), Fake("b"))
    assert [each.attributes.get("espalier.lost") for each in spans.named("route")] == [None, EngineRefused.code]


async def test_a_trace_that_begins_at_the_gateway_is_recorded_too(autojump_clock: MockClock) -> None:
    trace = child_span(None, OWN)
    assert (await answered(Fake("a"), trace=trace)).tree(trace.span) == ["route", "generate"]


@pytest.mark.parametrize("trace", [None, evolve(GATEWAY, sampled=False)])
async def test_nothing_is_recorded_of_a_trace_that_is_not_sampled(
    autojump_clock: MockClock, trace: Trace | None
) -> None:
    worker = Fake("a")
    assert (await answered(worker, trace=trace)).all == []
    assert [request.trace for request in worker.asked] == [trace]
