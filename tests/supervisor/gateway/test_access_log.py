"""The access log and the metrics of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.dialects import chat as chat_dialect
from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.dialects.responses import Events
from protocol.errors import Forbidden, Unauthorized
from protocol.messages.generation import RouteTaken
from tests.rig.gateway import Rig, Worker, chat, create, gateway_rig, head, leave_all, post, response, text
from tests.rig.log_records import log_records
from tests.rig.sockets import gateway_websocket, whole

INTERNAL = [("request ended", 500, "internal")]
Logged = Callable[[], Any]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """The lines of the access log so far: message, status and outcome."""
    caplog.set_level(logging.INFO)

    def lines() -> list[Any]:
        ours = [record for record in log_records(caplog) if record.name == "espalier.requests"]
        return [(record.message, record.status, record.outcome) for record in ours]

    return lines


@pytest.fixture
def bugs(caplog: pytest.LogCaptureFixture) -> Logged:
    """The number of bugs that were logged with their tracebacks."""
    return lambda: sum(
        record.message == "a bug failed a request" and bool(record.exc_info) for record in log_records(caplog)
    )


def number(rig: Rig, sample: str) -> float:
    """The value of one sample as it is scraped, 0 if it is not there."""
    lines = rig.metrics.render({}).decode().splitlines()
    return sum(float(line.removeprefix(sample)) for line in lines if line.startswith(f"{sample} "))


def breaks(*_: object, **__: object) -> None:
    raise KeyError("a bug")


# Tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "best_of": 2, "n": 1}])
async def test_an_echoed_prompt_counts_neither_as_a_token_nor_as_a_gap(
    fields: Mapping[str, int], rather_slow: MockClock
) -> None:
    async with gateway_rig() as rig:
        assert (await (await rig.client()).ask(text("n=5 s=0.1", **fields))).status == 200
        assert " -" not in rig.metrics.render({}).decode()
        assert number(rig, 'gen_ai_server_time_per_output_token_seconds_count{model="tiny"}') == 4


async def test_cached_tokens_of_several_prompts_are_counted_as_in_the_usage(rather_slow: MockClock) -> None:
    async with gateway_rig(worker=Worker(cached=3, route=RouteTaken("main/a", 3))) as rig:
        reply = await (await rig.client()).ask(text(["n=2 one", "n=2 two"]))
        assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
        assert reply.headers["x-route"] == "main/a; expected=3; cached=3", "of one prompt"
        assert number(rig, 'espalier_tokens_total{kind="cached",model="tiny"}') == 6


# Routes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "header", "fields"),
    [
        (RouteTaken("main/a", 8), "main/a; expected=8; cached=3", (8, None)),
        (RouteTaken("main/a", 8, 33.21), "main/a; expected=8; cached=3; score=33.2", (8, 33.2)),
        (RouteTaken("p+d", 3, 0.0), "p+d; expected=3; cached=3; score=0.0", (3, 0.0)),
    ],
)
async def test_a_route_and_what_was_expected_there_are_in_a_header_and_in_the_log(
    route: RouteTaken,
    header: str,
    fields: tuple[int, float | None],
    rather_slow: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with gateway_rig(worker=Worker(cached=3, route=route)) as rig:
        reply = await (await rig.client()).ask(post(chat()))
        assert reply.headers["x-route"] == header
        await leave_all(rig)
    (line,) = (record for record in log_records(caplog) if record.name == "espalier.requests")
    noted = line.worker, line.overlap_tokens, getattr(line, "route_score", None)
    assert noted == (route.workers, *fields)


# Bugs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "name", "ask"),
    [
        (ChoiceChunks, "finish", text(stream=True, echo=True)),
        (AnswerBuilder, "add", post(chat())),
        (AnswerBuilder, "whole", post(chat())),
        (chat_dialect.Chunks, "text", post(chat(stream=True))),
        (Events, "finish", response(stream=True)),
    ],
)
async def test_a_bug_in_a_response_is_logged_as_a_bug_and_not_as_a_refusal(
    cls: object,
    name: str,
    ask: bytes,
    rather_slow: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
    bugs: Logged,
) -> None:
    monkeypatch.setattr(cls, name, breaks)
    async with gateway_rig() as rig:
        client = await rig.client()
        reply = await client.ask(ask)
        assert reply.status == 500 or b"internal" in reply.body
        assert b"[DONE]" not in reply.body
        await leave_all(rig)
        assert (logged(), bugs()) == (INTERNAL, 1)
        assert "espalier_refusals_total{" not in rig.metrics.render({}).decode()


@pytest.mark.parametrize("name", ["begin", "delta", "finish"])
async def test_a_bug_in_a_lane_is_logged_as_a_bug_and_not_as_a_refusal(
    name: str, rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch, logged: Logged, bugs: Logged
) -> None:
    async with gateway_websocket() as (rig, client):
        monkeypatch.setattr(Events, name, breaks)
        await client.say(create())
        last = (await client.events("error", "response.failed"))[-1]
        error = last["error"] if last["type"] == "error" else last["response"]["error"]
        assert error["code"] in {"internal", "server_error"}
        assert (logged(), bugs()) == (INTERNAL, 1)
        assert "espalier_refusals_total{" not in rig.metrics.render({}).decode()
        monkeypatch.undo()
        assert (await whole(client, create()))["status"] == "completed"


# Leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["requests_max", "websocket_running_max"])
async def test_a_cancelled_request_that_waited_is_not_counted_as_refused(
    limit: str, rather_slow: MockClock, logged: Logged
) -> None:
    """It waits for admission, or on its connection for an earlier response."""
    async with gateway_websocket(**{limit: 1}) as (rig, client):
        await client.say(create("n=500 s=1", stream_id="a"))
        await rig.worker.began.wait()
        await client.say(create(stream_id="b"))
        await trio.sleep(0.1)
        await client.say({"type": "response.cancel", "stream_id": "b"})
        assert (await client.events("response.incomplete"))[-1]["stream_id"] == "b"
        assert logged() == [("request ended", 408, "left")]
        assert "espalier_refusals_total{" not in rig.metrics.render({}).decode()


# Probes ------------------------------------------------------------------------------------------


async def test_refused_probes_are_logged_at_debug_level_and_counted(
    logged: Logged, caplog: pytest.LogCaptureFixture, rather_slow: MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway_rig() as rig:
        rig.gateway.probes = evolve(rig.gateway.probes, unready=lambda: "engine tiny is starting")
        client = await rig.client()
        for _ in range(30):
            assert (await client.ask(head(path="/ready"))).status == 503
        await trio.sleep(3)
        assert logged() == [("request refused", 503, "not_ready")] * 30
        assert {record.levelname for record in log_records(caplog) if record.name == "espalier.requests"} == {"DEBUG"}
        assert number(rig, 'espalier_refusals_total{code="not_ready"}') == 30
        assert (await client.ask(head(path="/nothing"))).status == 404
    assert [record.levelname for record in log_records(caplog) if record.name == "espalier.requests"][30:] == ["INFO"]


# Lines -------------------------------------------------------------------------------------------


async def test_many_refusals_are_few_lines_and_one_count(
    rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with gateway_rig() as rig:
        for _ in range(1000):
            rig.gateway.access_log.log_refused(
                Unauthorized("no"), request_id="r", request_line="POST /v1/chat/completions"
            )
        await trio.sleep(3)
        assert number(rig, 'espalier_refusals_total{code="invalid_api_key"}') == 1000
    *lines, last = log_records(caplog)
    assert len(lines) == 10
    assert (lines[0].status, lines[0].outcome, lines[0].key, lines[0].request_id) == (401, "invalid_api_key", "-", "r")
    assert (last.message, last.count, last.outcome) == ("more were refused", 990, "invalid_api_key")


async def test_an_error_is_logged_once_with_a_short_printable_request_line(
    rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    error = Forbidden("no")
    async with gateway_rig() as rig:
        rig.gateway.access_log.log_refused(error, request_id="r", request_line="GET /\x1b[2J" + "x" * 500, status=431)
        rig.gateway.access_log.log_refused(error, request_id="r", request_line="again")
    (line,) = log_records(caplog)
    assert line.status == 431
    assert line.request.startswith("GET /\\x1b[2J")
    assert len(line.request) == 128
