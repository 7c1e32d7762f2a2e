"""A trace context from a client's header to log lines, to each leg of a request, and to the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, TypeAlias, cast

import pytest
from attrs import evolve, frozen
from trio.testing import MockClock

from actors.engines.port import Generation
from actors.kit.calls import Address
from protocol.errors import EngineLost, EngineRefused, InternalError
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.trace import Trace, child_span
from supervisor.cluster.cluster_worker import Replies
from supervisor.cluster.workers import RemoteWorker
from tests.actors import test_decode
from tests.rig import router
from tests.rig.fake_engine import Costs, FakeEngine, generate
from tests.rig.gateway import Worker, at_rest, chat, create, gateway_rig, head, post
from tests.rig.nodes import Node, all_linked, linked_nodes, until
from tests.rig.router import Fake, Play, pair, routed
from tests.rig.sockets import websocket_client

ID, SPAN, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "0123456789abcdef" * 2
PARENT = f"00-{ID}-{SPAN}-01"
ASKER = Trace(ID, SPAN)
GATEWAY = child_span(ASKER, OWN)  # the gateway's span


Lines: TypeAlias = Callable[..., list[Any]]
GenerateAddress: TypeAlias = Address[Generate, Started | Tokens, Finished]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """What was logged of requests, as a span or nothing."""
    caplog.set_level(logging.INFO)

    def logged(message: str = "request ended") -> list[Any]:
        return [record for record in caplog.records if record.message == message]

    return logged


def traces(*workers: Fake | Worker) -> list[Trace]:
    """Return the traces of the requests that these workers were asked for; each has one."""
    asked = [request.trace for worker in workers for request in worker.asked]
    found = [trace for trace in asked if trace is not None]
    assert len(found) == len(asked), "a request has no trace"
    return found


def span(line: Any) -> Trace:
    return Trace(line.trace, line.span, getattr(line, "parent", None))


# At the gateway ---------------------------------------------------------------------------


async def test_a_request_is_a_span_of_its_clients_trace_in_the_log_and_for_whoever_computes(lines: Lines) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        for stream in (False, True):
            await client.ask(
                post(chat("n=2", stream=stream), traceparent=PARENT, tracestate="a=b", x_request_id="mine")
            )
        asked = traces(rig.worker)
    assert [span(line) for line in lines()] == [evolve(trace, state="") for trace in asked]
    assert {(trace.id, trace.parent, trace.state) for trace in asked} == {(ID, SPAN, "a=b")}
    assert len({SPAN, *(trace.span for trace in asked)}) == 3
    assert [line.request_id for line in lines()] == ["mine", "mine"]
    assert all(request.id != ID for request in rig.worker.asked)


@pytest.mark.parametrize("headers", [{}, {"traceparent": PARENT.upper()}, {"traceparent": "00", "tracestate": "a=b"}])
async def test_without_a_trace_that_is_valid_each_request_begins_its_own(headers: dict[str, str], lines: Lines) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        for _ in range(2):
            assert (await client.ask(post(chat("n=2"), **headers))).status == 200
        first, second = traces(rig.worker)
    assert first.id != second.id
    assert (first.parent, first.state, first.followed) == (None, "", False)
    assert [span(line) for line in lines()] == [first, second]


async def test_requests_without_a_model_and_refused_ones_have_their_trace_too(lines: Lines) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        assert (await client.ask(head(path="/v1/models", traceparent=PARENT))).status == 200
        assert (await client.ask(head(path="/nothing", traceparent=PARENT))).status == 404
        assert (await client.ask(post(chat(model="none"), traceparent=PARENT))).status == 404
        await client.send(b"\x00\r\n\r\n")  # no request, so no span
        assert (await client.reply()).status == 400
    refused = lines("request refused")
    assert [getattr(each, "trace", None) for each in [*lines(), *refused]] == [ID, ID, ID, None]


async def test_a_bug_is_logged_with_its_trace(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_rig() as rig:
        monkeypatch.setattr("supervisor.gateway.http.routes.completions.reply_whole", None)
        assert (await (await rig.client()).ask(post(chat(), traceparent=PARENT))).status == 500
    (line,) = lines("a bug failed a request")
    assert (line.trace, line.parent) == (ID, SPAN)


async def test_over_a_websocket_every_response_is_a_span_of_the_trace_of_its_upgrade(lines: Lines) -> None:
    async with gateway_rig() as rig:
        client = await websocket_client(rig, traceparent=PARENT)
        for prompt in ("n=2", "n=3"):
            await client.say(create(prompt))
            await client.events()
        await client.say(create(model="none"))
        await client.say(b"{")
        assert [(await client.events())[-1]["type"] for _ in range(2)] == ["error"] * 2
        await client.stream.aclose()
        await at_rest(rig)
    assert [span(line) for line in lines()] == traces(rig.worker)
    spans = [*traces(rig.worker), *map(span, lines("request refused"))]
    assert [(each.id, each.parent) for each in spans] == [(ID, SPAN)] * 4
    assert len({each.span for each in spans}) == 4


async def test_a_response_that_is_cancelled_while_it_waits_is_a_span_too(lines: Lines) -> None:
    async with gateway_rig(websocket_running_max=1) as rig:
        client = await websocket_client(rig, traceparent=PARENT)
        await client.say(create("n=1000 s=1", stream_id="runs"))
        await client.events("response.in_progress")
        await client.say(create("n=1", stream_id="waits"))
        await client.say({"type": "response.cancel", "stream_id": "waits"})
        assert (await client.events())[-1]["stream_id"] == "waits"
        await client.stream.aclose()
        await at_rest(rig)
    waits, runs = map(span, lines())
    assert (waits.id, waits.parent) == (runs.id, runs.parent) == (ID, SPAN)
    assert waits.span != runs.span


# Each leg ---------------------------------------------------------------------------------


def spans(*workers: Fake) -> list[Any]:
    return [(trace.id, trace.span, trace.parent) for trace in traces(*workers)]


async def test_each_leg_of_a_pair_is_a_span_below_the_gateways(autojump_clock: MockClock) -> None:
    prefill, decode = pair()
    async with routed(prefill, decode) as running_router:
        running_router.routing.new_id = counted()
        await router.ask(running_router, evolve(router.generate(), trace=GATEWAY))
    assert sorted(spans(prefill, decode)) == [(ID, f"{n:016x}", GATEWAY.span) for n in (1, 2)]


async def test_a_worker_that_resumes_is_a_span_of_its_own(autojump_clock: MockClock) -> None:
    workers = Fake("a", [Play(EngineLost("it died"), tokens=2)]), Fake("b")
    async with routed(*workers) as running_router:
        running_router.routing.new_id = counted()
        await router.ask(running_router, evolve(router.generate(tokens_max=4), trace=GATEWAY))
    (first,), (second,) = spans(workers[0]), spans(workers[1])
    assert (first[0], first[2]) == (second[0], second[2]) == (ID, GATEWAY.span)
    assert first[1] != second[1]


@pytest.mark.parametrize("trace", [None, child_span(None, OWN), evolve(GATEWAY, sampled=False)])
async def test_for_a_trace_that_the_client_does_not_record_no_random_ids_are_drawn(
    trace: Trace | None, autojump_clock: MockClock
) -> None:
    prefill, decode = pair()
    async with routed(prefill, decode) as running_router:
        running_router.routing.new_id = partial(pytest.fail, "an id is drawn")
        await router.ask(running_router, evolve(router.generate(), trace=trace))
    assert [request.trace for worker in (prefill, decode) for request in worker.asked] == [trace] * 2


def counted() -> Callable[[], str]:
    numbers = iter(range(1, 99))
    return lambda: f"{next(numbers):032x}"


# At a worker ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("within_s", "costs", "outcome", "took_s"),
    [
        (1000.0, Costs(), "ended", 3.0),
        (1.5, Costs(), "left", 1.5),
        (1000.0, Costs(refused=lambda _: True), EngineRefused.code, 1.0),
    ],
)
async def test_a_worker_logs_its_part_of_a_recorded_trace(
    within_s: float, costs: Costs, outcome: str, took_s: float, lines: Lines, autojump_clock: MockClock
) -> None:
    async with test_decode.working(costs) as worker:
        with suppress(EngineRefused):
            await test_decode.leave_after(worker, evolve(generate("r"), trace=GATEWAY), within_s)
        await until(lambda: lines("generation ended"))
    (line,) = lines("generation ended")
    assert (line.request_id, line.outcome, line.duration_s, span(line)) == ("r", outcome, took_s, GATEWAY)


@pytest.mark.parametrize("trace", [None, child_span(None, OWN), evolve(GATEWAY, sampled=False)])
async def test_a_worker_logs_nothing_of_other_requests(
    trace: Trace | None, lines: Lines, autojump_clock: MockClock
) -> None:
    async with test_decode.working() as worker:
        await test_decode.ask(worker, evolve(generate("r"), trace=trace))
    assert lines("generation ended") == []


async def test_the_log_of_a_bug_of_a_worker_has_the_trace(lines: Lines, autojump_clock: MockClock) -> None:
    class Buggy(FakeEngine):
        def submit(self, request: Generate) -> Generation:
            raise ZeroDivisionError

    trace = child_span(None, OWN)
    async with test_decode.working(engine=Buggy(Costs())) as worker:
        with pytest.raises(InternalError):
            await test_decode.ask(worker, evolve(generate("r"), trace=trace))
    (line,) = lines("a bug failed a request")
    assert (line.request_id, span(line)) == ("r", trace)


# Between nodes ----------------------------------------------------------------------------


async def test_a_trace_crosses_a_link_as_it_is(rather_slow: MockClock) -> None:
    a, b = Node("a"), Node("b")
    there: list[Generate] = []
    wanted = evolve(generate("a" * 32), trace=evolve(GATEWAY, state="a=b"))
    async with linked_nodes(a, b):
        await all_linked(a, b)
        here = cast("GenerateAddress", b.directory.local["b-0"].address)
        (worker,) = (each for each in a.directory.workers("oak") if isinstance(each, RemoteWorker))
        b.directory.local["b-0"].address = cast("GenerateAddress", Noting(here, there))
        async with worker.ask(wanted, wanted.sampling.tokens_max) as replies:
            await replies.result()
    assert there == [wanted]


@frozen
class Noting:
    """An address that notes what is asked there."""

    address: GenerateAddress
    asked: list[Generate]

    def ask(self, request: Generate, credit: int) -> AbstractAsyncContextManager[Replies]:
        self.asked.append(request)
        return self.address.ask(request, credit)
