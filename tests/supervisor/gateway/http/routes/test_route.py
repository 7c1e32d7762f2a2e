"""What each path answers beside chat: completions, responses, tokens, and what an operator asks."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from attrs import evolve

from protocol.openapi.document import Access, Operation, json_body
from supervisor.gateway.http.routes import ROUTES, Route, RouteTable
from supervisor.gateway.origins import METHODS
from tests.rig.dialects import response_event_types
from tests.rig.gateway import Reply, Worker, at_rest, chat, head, post, rig
from tests.rig.log_records import log_records
from tests.system.fuzz import bodies
from tests.system.fuzz.http import attacked


def text(said="n=5", **fields) -> bytes:
    return post({"model": "tiny", "prompt": said, **fields}, "/v1/completions")


def response(said: str = "n=5", **fields) -> bytes:
    return post({"model": "tiny", "input": said, **fields}, "/v1/responses")


def server_sent(reply: Reply):
    """The events of a stream that names them."""
    parts = reply.body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# Completions ---------------------------------------------------------------------------------------


async def test_a_text_is_completed_in_one_piece_or_as_it_comes(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        whole = (await client.ask(text("n=4"))).json
        assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "The oak is o")
        assert whole["usage"]["completion_tokens"] == 4
        reply = await client.ask(text("n=4", stream=True, stream_options={"include_usage": True}))
        assert (reply.whole, reply.events[-1]) == (True, "[DONE]")
        assert "".join(each["text"] for chunk in reply.chunks for each in chunk["choices"]) == "The oak is o"
        assert reply.chunks[-1]["usage"]["completion_tokens"] == 4


async def test_choices_of_one_stream_come_as_they_are_made_and_each_ends_once(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig() as made:
        client = await made.client()
        for reply, key in [
            (await client.ask(post(chat("n=3 s=1", n=3, stream=True))), "delta"),
            (await client.ask(text(["n=3 s=1", "n=2 s=1"], stream=True)), "text"),
        ]:
            told, ends = {}, []
            for chunk in reply.chunks:
                for each in chunk["choices"]:
                    piece = each["delta"].get("content", "") if key == "delta" else each["text"]
                    told[each["index"]] = told.get(each["index"], "") + piece
                    ends += [each["index"]] if each["finish_reason"] else []
            assert sorted(ends) == sorted(told)
            assert (reply.events[-1], set(told.values()) <= {"The oak is", "The oak"}) == ("[DONE]", True)
            assert len(told) == (3 if key == "delta" else 2)
        whole = await client.ask(post(chat("n=2", n=2)))
        assert [each["index"] for each in whole.json["choices"]] == [0, 1]


@pytest.mark.parametrize("ask", [text, response])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_any_answer_is_aborting(
    ask: Callable[..., bytes], stream: bool, rather_slow: trio.testing.MockClock
) -> None:
    async with rig() as made:
        client = await made.client()
        await client.send(ask("n=100 s=1", stream=stream))
        await trio.sleep(2.5)
        await client.stream.aclose()
        await at_rest(made)
        assert (made.worker.left, trio.current_time() < 3) == (1, True)


# Responses -----------------------------------------------------------------------------------------


async def test_a_response_comes_in_one_piece_or_as_events(rather_slow: trio.testing.MockClock) -> None:
    async with rig(worker=Worker(cached=1)) as made:
        client = await made.client()
        whole = (await client.ask(response("n=3"))).json
        assert (whole["object"], whole["status"]) == ("response", "completed")
        assert whole["output"][0]["content"][0]["text"] == "The oak is"
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 1
        reply = await client.ask(response("n=3", stream=True))
        assert (reply.whole, reply.headers["content-type"]) == (True, "text/event-stream; charset=utf-8")
        events = server_sent(reply)
        assert [event["type"] for event in events] == response_event_types(3)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_a_response_that_fails_says_so_and_never_looks_whole(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        early = await client.ask(response("n=5 fail=0"))
        assert (early.status, early.error["code"]) == (503, "engine_lost")
        reply = await client.ask(response("n=5 fail=2", stream=True))
        assert (reply.status, reply.whole) == (200, True)  # its last event says that the answer is not
        last = server_sent(reply)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


async def test_over_http_nothing_is_remembered(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        first = (await client.ask(response("n=1"))).json["id"]
        reply = await client.ask(response("n=1", previous_response_id=first))
        assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
        assert (await client.ask(head(path=f"/v1/responses/{first}"))).status == 404


# Tokens --------------------------------------------------------------------------------------------


async def test_a_text_becomes_tokens_and_a_text_again(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        there = (await client.ask(post({"model": "tiny", "prompt": "The oak is old"}, "/tokenize"))).json
        assert (there["count"], there["max_model_len"]) == (len(there["tokens"]), 2048)
        back = await client.ask(post({"model": "tiny", "tokens": there["tokens"]}, "/detokenize"))
        assert back.json["text"] == "The oak is old"
        assert (await client.ask(post({"prompt": "x"}, "/tokenize"))).status == 200
        assert (await client.ask(post({"model": "other", "prompt": "x"}, "/tokenize"))).status == 404
        wrong = await client.ask(post({"model": "tiny", "tokens": [1, 99_999_999]}, "/detokenize"))
        assert (wrong.status, wrong.error["param"]) == (400, "tokens")


async def test_tokens_are_for_those_alone_who_get_in(rather_slow: trio.testing.MockClock) -> None:
    async with rig(requests_max=1, waiting_max=1, admit_s=1) as made:
        busy = await made.client()
        await busy.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        client = await made.client()
        reply = await client.ask(post({"model": "tiny", "prompt": "x"}, "/tokenize"))
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        await busy.stream.aclose()
        await trio.sleep(0.1)
        made.gateway.drain()
        reply = await (await made.client()).ask(post({"model": "tiny", "prompt": "x"}, "/tokenize"))
        assert (reply.status, reply.error["code"]) == (503, "draining")


# Operators -----------------------------------------------------------------------------------------


async def test_a_server_tells_about_itself_if_it_can(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        assert (await client.ask(head(path="/server_info"))).status == 404
        made.gateway.server_info = lambda: {"version": "1", "engines": {}}
        made.gateway.limits = evolve(made.gateway.limits, websocket_lanes_max=3)  # as a reload does
        for path in ("/server_info", "/get_server_info"):
            told = (await client.ask(head(path=path))).json
            assert told.pop("limits")["websocket_lanes_max"] == 3
            assert told == {"version": "1", "engines": {}}


async def test_a_model_is_told_about(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        for path in ("/model_info", "/get_model_info", "/model_info?model=tiny&x=1"):
            told = (await client.ask(head(path=path))).json
            assert (told["model_path"], told["max_model_len"], told["is_generation"]) == ("tiny", 2048, True)
        assert (await client.ask(head(path="/model_info?model=other"))).status == 404
        made.gateway.runner.served |= {"second": made.gateway.runner.served["tiny"]}
        refused = await client.ask(head(path="/model_info"))
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert (await client.ask(post({"prompt": "x"}, "/tokenize"))).error["param"] == "model"


async def test_a_cache_is_flushed_by_those_who_may_and_by_no_page_of_elsewhere(
    rather_slow: trio.testing.MockClock,
) -> None:
    flushed = 0

    async def flush() -> None:
        nonlocal flushed
        flushed += 1
        await trio.lowlevel.checkpoint()

    async with rig() as made:
        client = await made.client()
        assert (await client.ask(post(b"", "/flush_cache"))).status == 404
        made.gateway.flush_cache = flush
        assert (await client.ask(head("HEAD", "/flush_cache"))).status == 200
        assert (await client.ask(head(path="/flush_cache", sec_fetch_site="cross-site"))).status == 403
        assert flushed == 0
        assert (await client.ask(head(path="/flush_cache"))).body == b"Cache flushed.\n"
        assert (await client.ask(post(b"", "/flush_cache"))).status == 200
        assert flushed == 2


def test_a_page_is_offered_the_methods_that_some_path_knows_and_no_others() -> None:
    assert ROUTES.find("*").allow == METHODS


def test_what_changes_the_server_or_counts_its_clients_is_for_admins() -> None:
    access = {operation.path: operation.access for operation in ROUTES.operations}
    assert {path for path in access if access[path] is Access.ADMIN} == {"/metrics", "/flush_cache"}
    assert {path for path in access if access[path] is Access.OPEN} == {"/health", "/ready"}


# A route of one's own ------------------------------------------------------------------------------

DIALECT = """
from attrs import frozen

from protocol.dialects.request_body import decode, read
from protocol.dialects.options import Name


@frozen(kw_only=True)
class ReverseRequest:
    text: Name


def parse(body: bytes) -> ReverseRequest:
    return read(decode(body), ReverseRequest)
"""
HANDLER = """
import msgspec

import reverse_dialect
from supervisor.gateway.http.exchange import JSON, Exchange
from supervisor.gateway.http.routes.route import log_answered


async def reverse(exchange: Exchange, body: bytes) -> None:
    request = await exchange.read(reverse_dialect.parse, body)
    exchange.reply(200, [JSON], msgspec.json.encode({"text": request.text[::-1]}))
    log_answered(exchange)
"""


@pytest.fixture
def with_reverse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The table of routes with one more, whose handler and dialect are files of their own."""
    (tmp_path / "reverse_dialect.py").write_text(DIALECT)
    (tmp_path / "reverse_route.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    dialect, route = import_module("reverse_dialect"), import_module("reverse_route")
    answer = json_body({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    operation = Operation("POST", "/reverse", "A text from its end.", answer, dialect.ReverseRequest, {"text": "oak"})
    yield RouteTable((*ROUTES.routes, Route(operation, route.reverse, probe=True)))
    for name in ("reverse_dialect", "reverse_route"):
        del sys.modules[name]


async def test_a_new_route_takes_its_handler_its_dialect_and_its_row(
    with_reverse, rather_slow: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "espalier.requests")
    async with rig(routes=with_reverse) as made:
        client = await made.client()
        assert (await client.ask(post({"text": "oak"}, "/reverse"))).json == {"text": "kao"}
        wrong = await client.ask(post({"text": 5}, "/reverse"))
        assert (wrong.status, wrong.error["param"]) == (400, "text")
        assert (await client.ask(head("GET", "/reverse"))).headers["allow"] == "POST, OPTIONS"
        described = (await client.ask(head(path="/openapi.json"))).json
    assert [record.levelname for record in log_records(caplog) if record.request == "POST /reverse"] == [
        "DEBUG",
        "INFO",
    ]
    assert described["paths"]["/reverse"]["post"]["summary"] == "A text from its end."
    assert described["components"]["schemas"]["ReverseRequest"]["required"] == ["text"]


def test_the_fuzzer_attacks_a_new_route_with_bodies_like_its_example(with_reverse) -> None:
    (operation,) = [each for each in attacked(with_reverse) if each.path == "/reverse"]
    assert bodies.body(Random(0), operation) == {"text": "oak"}
    assert json.loads(bodies.mutated(Random(0), {"text": "oak"})) is not None


def test_routes_of_one_path_agree_about_who_may_call_them() -> None:
    rows = [
        Operation(method, "/x", "", {}, access=access)
        for method, access in (("GET", Access.KEY), ("POST", Access.ADMIN))
    ]
    with pytest.raises(ValueError, match="the routes of /x differ in who may call them: admin, key"):
        RouteTable([Route(row, ROUTES.routes[0].handler) for row in rows])
