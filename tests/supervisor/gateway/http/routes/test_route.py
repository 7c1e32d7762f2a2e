"""The routes beside chat: completions, responses, tokens, and those for operators."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.access import Access
from protocol.errors import RequestError
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATIONS, FlushCache
from protocol.openapi.document import Operation, json_body
from supervisor.gateway.http.routes import ROUTES, HttpRoute, RouteTable
from supervisor.gateway.origins import METHODS
from tests.rig.dialects import response_event_types
from tests.rig.gateway import Reply, Worker, chat, gateway_client, head, leave_all, post, response, text
from tests.rig.log_records import log_records


def server_sent(reply: Reply) -> list[Any]:
    """Return the events of a stream of named server-sent events."""
    parts = reply.body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# Completions ---------------------------------------------------------------------------------------


async def test_a_text_is_completed_in_one_piece_or_streamed(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        whole = (await client.ask(text("n=4"))).json
        assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "The oak is o")
        assert whole["usage"]["completion_tokens"] == 4
        reply = await client.ask(text("n=4", stream=True, stream_options={"include_usage": True}))
        assert (reply.whole, reply.events[-1]) == (True, "[DONE]")
        assert "".join(choice["text"] for chunk in reply.chunks for choice in chunk["choices"]) == "The oak is o"
        assert reply.chunks[-1]["usage"]["completion_tokens"] == 4


async def test_choices_of_one_stream_are_interleaved_and_each_ends_once(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        for reply, key in [
            (await client.ask(post(chat("n=3 s=1", n=3, stream=True))), "delta"),
            (await client.ask(text(["n=3 s=1", "n=2 s=1"], stream=True)), "text"),
        ]:
            texts, ends = dict[int, str](), list[int]()
            for chunk in reply.chunks:
                for each in chunk["choices"]:
                    piece = each["delta"].get("content", "") if key == "delta" else each["text"]
                    texts[each["index"]] = texts.get(each["index"], "") + piece
                    ends += [each["index"]] if each["finish_reason"] else []
            assert sorted(ends) == sorted(texts)
            assert (reply.events[-1], set(texts.values()) <= {"The oak is", "The oak"}) == ("[DONE]", True)
            assert len(texts) == (3 if key == "delta" else 2)
        whole = await client.ask(post(chat("n=2", n=2)))
        assert [choice["index"] for choice in whole.json["choices"]] == [0, 1]


async def test_a_choice_that_goes_on_when_the_others_have_ended_keeps_its_tokens(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        alone = (await client.ask(text("n=6"))).json["choices"][0]["text"]
        for _ in range(20):  # which of them is first in a turn is chance
            reply = await client.ask(text(["n=2 s=1", "n=6 s=1"], stream=True))
            texts = ["", ""]
            for each in (choice for chunk in reply.chunks for choice in chunk["choices"]):
                texts[each["index"]] += each["text"]
            assert texts == ["The oak", alone]


@pytest.mark.parametrize("ask", [text, response])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_of_any_route_is_aborted_when_its_client_leaves(
    ask: Callable[..., bytes], stream: bool, rather_slow: MockClock
) -> None:
    async with gateway_client() as (rig, client):
        await client.send(ask("n=100 s=1", stream=stream))
        await trio.sleep(2.5)
        await leave_all(rig)
        assert (rig.worker.left, trio.current_time() < 3) == (1, True)


# Responses -----------------------------------------------------------------------------------------


async def test_a_response_comes_in_one_piece_or_as_events(rather_slow: MockClock) -> None:
    async with gateway_client(worker=Worker(cached=1)) as (_, client):
        whole = (await client.ask(response("n=3"))).json
        assert (whole["object"], whole["status"]) == ("response", "completed")
        assert whole["output"][0]["content"][0]["text"] == "The oak is"
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 1
        reply = await client.ask(response("n=3", stream=True))
        assert (reply.whole, reply.headers["content-type"]) == (True, "text/event-stream; charset=utf-8")
        assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
        events = server_sent(reply)
        assert [event["type"] for event in events] == response_event_types(3)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_a_response_that_fails_ends_with_response_failed(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        early = await client.ask(response("n=5 fail=0"))
        assert (early.status, early.error["code"]) == (503, "engine_lost")
        reply = await client.ask(response("n=5 fail=2", stream=True))
        assert (reply.status, reply.whole) == (200, True)  # its last event says that the answer is not
        last = server_sent(reply)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


async def test_over_http_no_response_can_be_continued_or_read_again(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        first = (await client.ask(response("n=1"))).json["id"]
        reply = await client.ask(response("n=1", previous_response_id=first))
        assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
        assert (await client.ask(head(path=f"/v1/responses/{first}"))).status == 404


# Tokens --------------------------------------------------------------------------------------------


async def test_a_text_becomes_tokens_and_a_text_again(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        there = (await client.ask(post({"model": "tiny", "prompt": "The oak is old"}, "/tokenize"))).json
        assert (there["count"], there["max_model_len"]) == (len(there["tokens"]), 2048)
        back = await client.ask(post({"model": "tiny", "tokens": there["tokens"]}, "/detokenize"))
        assert back.json["text"] == "The oak is old"
        assert (await client.ask(post({"prompt": "x"}, "/tokenize"))).status == 200
        assert (await client.ask(post({"model": "other", "prompt": "x"}, "/tokenize"))).status == 404
        wrong = await client.ask(post({"model": "tiny", "tokens": [1, 99_999_999]}, "/detokenize"))
        assert (wrong.status, wrong.error["param"]) == (400, "tokens")


async def test_tokenize_waits_for_admission(rather_slow: MockClock) -> None:
    async with gateway_client(requests_max=1, waiting_max=1, admit_s=1) as (rig, busy):
        await busy.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        client = await rig.client()
        reply = await client.ask(post({"model": "tiny", "prompt": "x"}, "/tokenize"))
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        await busy.stream.aclose()
        await trio.sleep(0.1)
        rig.gateway.drain()
        reply = await (await rig.client()).ask(post({"model": "tiny", "prompt": "x"}, "/tokenize"))
        assert (reply.status, reply.error["code"]) == (503, "draining")


# Operators -----------------------------------------------------------------------------------------


async def test_server_info_shows_the_limits_of_this_moment(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        assert (await client.ask(head(path="/server_info"))).status == 404
        rig.gateway.administration = evolve(
            rig.gateway.administration, server_info=lambda: {"version": "1", "engines": {}}
        )
        rig.gateway.limits = evolve(rig.gateway.limits, websocket_lanes_max=3)
        for path in ("/server_info", "/get_server_info"):
            info = (await client.ask(head(path=path))).json
            assert info.pop("limits")["websocket_lanes_max"] == 3
            assert info == {"version": "1", "engines": {}}


async def test_model_info_names_the_model_or_the_only_one(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        for path in ("/model_info", "/get_model_info", "/model_info?model=tiny&x=1"):
            info = (await client.ask(head(path=path))).json
            assert (info["model_path"], info["max_model_len"], info["is_generation"]) == ("tiny", 2048, True)
        assert (await client.ask(head(path="/model_info?model=other"))).status == 404
        served = rig.gateway.runner.served
        rig.gateway.runner.served = {**served, "second": served["tiny"]}
        refused = await client.ask(head(path="/model_info"))
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert (await client.ask(post({"prompt": "x"}, "/tokenize"))).error["param"] == "model"


async def test_flush_cache_is_refused_to_foreign_pages_and_ignored_for_head(rather_slow: MockClock) -> None:
    flushed = list[str | None]()

    async def operate(request: Message, engine: str | None) -> dict[str, Message | RequestError]:
        assert request == FlushCache()
        flushed.append(engine)
        await trio.lowlevel.checkpoint()
        return {"main/tiny-0": Done()}

    async with gateway_client() as (rig, client):
        assert (await client.ask(post(b"", "/flush_cache"))).status == 404
        rig.gateway.administration = evolve(rig.gateway.administration, operate=operate)
        assert (await client.ask(head("HEAD", "/flush_cache"))).status == 200
        assert (await client.ask(head(path="/flush_cache", sec_fetch_site="cross-site"))).status == 403
        assert flushed == []
        assert (await client.ask(head(path="/flush_cache"))).body == b"Cache flushed.\n"
        assert (await client.ask(post(b"", "/flush_cache"))).status == 200
        assert (await client.ask(post(b"", "/flush_cache?engine=tiny-0"))).status == 200
        for query in ("engin=tiny-0", "engine=", "engine", "engine=tiny-0&all=1"):
            reply = await client.ask(post(b"", f"/flush_cache?{query}"))
            assert reply.status == 400, "a misspelt name would mean every engine"
        assert flushed == [None, None, "tiny-0"], "the named engine alone"


def test_a_preflight_allows_the_methods_of_all_routes() -> None:
    every = ROUTES.find("*")
    assert every is not None
    assert every.allow == METHODS


def test_metrics_pools_and_flush_cache_are_for_admins_and_probes_for_everybody() -> None:
    access = {operation.path: operation.access for operation in ROUTES.operations}
    operations = {row.path for row in OPERATIONS if row.path is not None}
    others = {"/metrics", "/pools", "/engine_files/{name}"}
    assert {path for path in access if access[path] is Access.ADMIN} == {*others, *operations}
    assert {path for path in access if access[path] is Access.OPEN} == {"/health", "/ready"}


# A new route ---------------------------------------------------------------------------------------

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
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered


async def reverse(exchange: Exchange, body: Body) -> None:
    request = await exchange.read(reverse_dialect.parse, body)
    exchange.response.reply(200, [JSON], msgspec.json.encode({"text": request.text[::-1]}))
    log_answered(exchange)
"""


@pytest.fixture
def with_reverse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouteTable]:
    """The table of routes with one more, whose handler and dialect are two new files."""
    (tmp_path / "reverse_dialect.py").write_text(DIALECT)
    (tmp_path / "reverse_route.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    dialect, route = import_module("reverse_dialect"), import_module("reverse_route")
    answer = json_body({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    operation = Operation("POST", "/reverse", "A text from its end.", answer, dialect.ReverseRequest, {"text": "oak"})
    yield RouteTable((*ROUTES.routes, HttpRoute(operation, route.reverse, probe=True)))
    for name in ("reverse_dialect", "reverse_route"):
        del sys.modules[name]


async def test_a_new_route_takes_its_handler_its_dialect_and_its_row(
    with_reverse: RouteTable, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "espalier.requests")
    async with gateway_client(routes=with_reverse) as (_, client):
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


def test_routes_of_one_path_agree_about_who_may_call_them() -> None:
    rows = [
        Operation(method, "/x", "", {}, access=access)
        for method, access in (("GET", Access.KEY), ("POST", Access.ADMIN))
    ]
    with pytest.raises(ValueError, match="the routes of /x differ in who may call them: admin, key"):
        RouteTable([HttpRoute(row, ROUTES.routes[0].handler) for row in rows])
