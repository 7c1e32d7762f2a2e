"""What the log and the metrics say of a request is what became of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import trio
import trio.testing

from protocol.dialects import chat as chat_dialect
from protocol.dialects import completions as completions_dialect
from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.dialects.responses import Events
from tests.rig.gateway import Rig, Worker, at_rest, chat, create, head, post, rig
from tests.rig.log_records import log_records
from tests.rig.sockets import websocket_client

INTERNAL = [("request ended", 500, "internal")]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture):
    """What the access log has told by now of each request."""
    caplog.set_level(logging.INFO)

    def lines():
        ours = [each for each in log_records(caplog) if each.name == "espalier.requests"]
        return [(each.message, each.status, each.outcome) for each in ours]

    return lines


@pytest.fixture
def bugs(caplog: pytest.LogCaptureFixture):
    """How many bugs were logged, with where they rose."""
    return lambda: sum(each.message == "a bug failed a request" and bool(each.exc_info) for each in log_records(caplog))


def text(said="n=5", **fields: bool) -> bytes:
    return post({"model": "tiny", "prompt": said, **fields}, "/v1/completions")


def response(said: str = "n=5", **fields: bool) -> bytes:
    return post({"model": "tiny", "input": said, **fields}, "/v1/responses")


def number(made: Rig, sample: str) -> float:
    """The value of one sample as it is scraped, 0 if it is not there."""
    lines = made.metrics.render({}).decode().splitlines()
    return sum(float(line.removeprefix(sample)) for line in lines if line.startswith(f"{sample} "))


def breaks(*_, **__):
    raise KeyError("a bug")


# Tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "best_of": 2, "n": 1}])
async def test_an_echo_is_no_token_and_has_no_gap_before_it(
    fields: Mapping[str, int], rather_slow: trio.testing.MockClock
) -> None:
    async with rig() as made:
        assert (await (await made.client()).ask(text("n=5 s=0.1", **fields))).status == 200
        assert " -" not in made.metrics.render({}).decode()
        assert number(made, 'gen_ai_server_time_per_output_token_seconds_count{model="tiny"}') == 4


async def test_what_was_cached_of_several_prompts_is_counted_as_the_client_is_told(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig(worker=Worker(cached=3)) as made:
        reply = await (await made.client()).ask(text(["n=2 one", "n=2 two"]))
        assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
        assert number(made, 'espalier_tokens_total{kind="cached",model="tiny"}') == 6


# Bugs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "name", "ask"),
    [
        (ChoiceChunks, "finish", text(stream=True, echo=True)),
        (completions_dialect.Chunks, "text", text(stream=True, echo=True)),
        (AnswerBuilder, "add", post(chat())),
        (AnswerBuilder, "whole", post(chat())),
        (AnswerBuilder, "whole", text()),
        (AnswerBuilder, "whole", response()),
        (chat_dialect.Chunks, "text", post(chat(stream=True))),
        (ChoiceChunks, "finish", text(stream=True)),
        (Events, "begin", response(stream=True)),
        (Events, "finish", response(stream=True)),
    ],
)
async def test_a_bug_in_an_answer_is_told_as_one_and_as_no_refusal(
    cls: object, name: str, ask: bytes, rather_slow: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, told, bugs
) -> None:
    monkeypatch.setattr(cls, name, breaks)
    async with rig() as made:
        client = await made.client()
        reply = await client.ask(ask)
        assert reply.status == 500 or b"internal" in reply.body
        assert b"[DONE]" not in reply.body
        await client.stream.aclose()
        await at_rest(made)
        assert (told(), bugs()) == (INTERNAL, 1)
        assert "espalier_refusals_total{" not in made.metrics.render({}).decode()


@pytest.mark.parametrize("name", ["begin", "delta", "finish"])
async def test_a_bug_in_a_lane_is_told_as_one_and_as_no_refusal(
    name: str, rather_slow: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, told, bugs
) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        monkeypatch.setattr(Events, name, breaks)
        await client.say(create())
        last = (await client.events("error", "response.failed"))[-1]
        error = last["error"] if last["type"] == "error" else last["response"]["error"]
        assert error["code"] in {"internal", "server_error"}
        assert (told(), bugs()) == (INTERNAL, 1)
        assert "espalier_refusals_total{" not in made.metrics.render({}).decode()
        monkeypatch.undo()
        await client.say(create())
        assert (await client.events())[-1]["type"] == "response.completed"


# Leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["requests_max", "websocket_running_max"])
async def test_whoever_cancels_what_waits_was_not_refused(
    limit: str, rather_slow: trio.testing.MockClock, told
) -> None:
    """It waits at the gate, or on its connection before it has got that far."""
    async with rig(**{limit: 1}) as made:
        client = await websocket_client(made)
        await client.say(create("n=500 s=1", stream_id="a"))
        await made.worker.began.wait()
        await client.say(create(stream_id="b"))
        await trio.sleep(0.1)
        await client.say({"type": "response.cancel", "stream_id": "b"})
        assert (await client.events("response.incomplete"))[-1]["stream_id"] == "b"
        assert told() == [("request ended", 408, "left")]
        assert "espalier_refusals_total{" not in made.metrics.render({}).decode()


# Probes ------------------------------------------------------------------------------------------


async def test_o12_a_probe_that_waits_for_the_server_is_no_line_of_the_log(
    told, caplog: pytest.LogCaptureFixture, rather_slow: trio.testing.MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    async with rig() as made:
        made.gateway.unready = lambda: "engine tiny is starting"
        client = await made.client()
        for _ in range(30):
            assert (await client.ask(head(path="/ready"))).status == 503
        await trio.sleep(3)
        assert told() == [("request refused", 503, "not_ready")] * 30
        assert {each.levelname for each in log_records(caplog) if each.name == "espalier.requests"} == {"DEBUG"}
        assert number(made, 'espalier_refusals_total{code="not_ready"}') == 30
        assert (await client.ask(head(path="/nothing"))).status == 404
    assert [each.levelname for each in log_records(caplog) if each.name == "espalier.requests"][30:] == ["INFO"]
