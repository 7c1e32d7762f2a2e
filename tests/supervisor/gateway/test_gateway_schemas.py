"""An answer under a schema validates, is cut at its number of tokens, or ends in an error; bad schemas are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trio.testing import MockClock

from tests.rig.gateway import TINY, Worker, chat, create, gateway_client, ids, post, response, text
from tests.rig.sockets import gateway_websocket, last_event

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GOOD, BAD = '{"a": 7}', '{"a": "x"}'
PASSWORD = r"^(?=.*[A-Z])(?=.*\d).{4}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def named(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def asks(line: str, **fields: Any) -> bytes:
    """Return a request that the worker answers by the line, under the schema `A`."""
    return post(chat(f"n={len(ids(line))}", **{"response_format": named(A), **fields}))


async def test_an_answer_that_validates_stops_and_the_engine_has_the_schema(autojump_clock: MockClock) -> None:
    async with gateway_client(worker=Worker(line=GOOD)) as (rig, client):
        reply = await client.ask(asks(GOOD))
        streamed = await client.ask(asks(GOOD, stream=True))
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert reply.json["choices"][0]["message"]["content"] == streamed.text == GOOD
        assert rig.worker.asked[0].sampling.grammar is not None


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True}, {"response_format": {"type": "json_object"}}])
async def test_an_answer_that_does_not_validate_is_an_error_and_counted(
    autojump_clock: MockClock, fields: dict[str, Any]
) -> None:
    line = "[7]" if "response_format" in fields else BAD
    async with gateway_client(worker=Worker(line=line)) as (rig, client):
        reply = await client.ask(asks(line, **fields))
        assert (reply.status, reply.error["code"], reply.error["type"]) == (500, "answer_invalid", "server_error")
        assert "response_format: it is JSON, but does not validate" in reply.error["message"]
        assert reply.headers["x-should-retry"] == "false"
        counted = rig.metrics.render({}).decode()
        assert [
            line for line in counted.splitlines() if "espalier_requests_total{" in line and "answer_invalid" in line
        ]


async def test_a_stream_of_an_answer_that_does_not_validate_never_stops(autojump_clock: MockClock) -> None:
    async with gateway_client(worker=Worker(line=BAD)) as (_, client):
        reply = await client.ask(asks(BAD, stream=True))
        *_, error = reply.chunks
        assert reply.text == BAD
        assert error["error"]["code"] == "answer_invalid"
        assert b'"stop"' not in reply.body


async def test_a_response_whose_answer_does_not_validate_fails(autojump_clock: MockClock) -> None:
    asked = f"n={len(ids(BAD))}", {"text": {"format": {"type": "json_schema", "name": "x", "schema": A}}}
    async with gateway_client(worker=Worker(line=BAD)) as (_, client):
        reply = await client.ask(response(asked[0], **asked[1]))
        assert (reply.status, reply.error["code"]) == (500, "answer_invalid")
        streamed = await client.ask(response(asked[0], stream=True, **asked[1]))
        assert b"event: response.failed" in streamed.body
        assert b'"cause":"answer_invalid"' in streamed.body
        assert b"response.completed" not in streamed.body


async def test_over_a_websocket_the_bad_answer_fails_alone(autojump_clock: MockClock) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": A}}
    async with gateway_websocket(worker=Worker(line=BAD)) as (rig, client):
        failed = await last_event(client, create(f"n={len(ids(BAD))}", text=form))
        assert (failed["type"], failed["response"]["error"]["cause"]) == ("response.failed", "answer_invalid")
        assert failed["response"]["status"] == "failed"
        rig.worker.line = GOOD
        whole = await last_event(client, create(f"n={len(ids(GOOD))}", text=form))
        assert whole["response"]["status"] == "completed"


async def test_an_answer_that_is_cut_at_its_tokens_ends_by_length(autojump_clock: MockClock) -> None:
    async with gateway_client(worker=Worker(line=BAD)) as (_, client):
        reply = await client.ask(asks(BAD, max_tokens=3))
        assert reply.json["choices"][0]["finish_reason"] == "length"


async def test_a_stop_that_cuts_json_is_the_clients_own_fault(autojump_clock: MockClock) -> None:
    async with gateway_client(worker=Worker(line=GOOD)) as (_, client):
        cut = await client.ask(asks(GOOD, stop=["7"]))
        assert (cut.status, cut.error["param"]) == (400, "stop")
        cut = await client.ask(asks(GOOD, stop_token_ids=[ids(GOOD)[2]]))
        assert (cut.status, cut.error["param"]) == (400, "stop_token_ids")
        whole = await client.ask(asks(GOOD, stop=["}"], include_stop_str_in_output=True))
        assert whole.json["choices"][0]["message"]["content"] == GOOD
        harmless = await client.ask(asks(GOOD, stop=["\n\n"]))
        assert harmless.json["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("listed", [False, True])
async def test_an_answer_that_the_models_end_token_ends_is_judged_as_the_models(
    autojump_clock: MockClock, listed: bool
) -> None:
    end = min(TINY.eos_token_ids)
    fields = {"stop_token_ids": [end]} if listed else {}
    async with gateway_client(worker=Worker(line=BAD, matched=end)) as (_, client):
        reply = await client.ask(asks(BAD, **fields))
        assert (reply.status, reply.error["code"]) == (500, "answer_invalid")


async def test_a_candidate_that_is_chosen_is_judged_without_its_echo(autojump_clock: MockClock) -> None:
    fields = {"response_format": named(A), "echo": True, "n": 1, "best_of": 2}
    async with gateway_client(worker=Worker(line=GOOD)) as (_, client):
        reply = await client.ask(text(f"n={len(ids(GOOD))}", **fields))
        assert reply.json["choices"][0]["text"].endswith(GOOD)
    async with gateway_client(worker=Worker(line=BAD)) as (_, client):
        reply = await client.ask(text(f"n={len(ids(BAD))}", **fields))
        assert reply.error["code"] == "answer_invalid"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {
                **A,
                "properties": {"a": {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 7}]}},
            },
            '{"a": 6}',
            '{"a": 8}',
        ),
        ({"type": "object", "required": ["a", "b"]}, '{"a": 1, "b": []}', '{"a": 1}'),
        ({"type": "array", "minItems": 2}, '["a", 1]', "[1]"),
        ({"type": "object", "minProperties": 1}, '{"c": null}', "{}"),
        ({**A, "properties": {"a": {"type": "string", "pattern": DECIMAL}}}, '{"a": "-1.5"}', '{"a": "-"}'),
    ],
)
async def test_an_answer_keeps_what_a_grammar_backend_ignores(
    autojump_clock: MockClock, schema: dict[str, object], good: str, bad: str
) -> None:
    worker = Worker()
    async with gateway_client(worker=worker) as (_, client):
        worker.line = good
        reply = await client.ask(asks(good, response_format=named(schema)))
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        grammar = worker.asked[0].sampling.grammar
        assert grammar is not None
        assert not any(word in grammar.text for word in ("allOf", "(?!"))
        worker.line = bad
        reply = await client.ask(asks(bad, response_format=named(schema)))
        assert reply.error["code"] == "answer_invalid"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": PASSWORD}}}, "#/properties/a: pattern: "),
        ({"type": "string", "pattern": "^(?!a)[a-z]{2}$"}, "#: pattern: "),
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems: "),
        ({"type": "thing"}, "#/type: "),
    ],
)
async def test_a_schema_that_cannot_be_kept_is_refused_by_place_and_keyword(
    autojump_clock: MockClock, schema: object, words: str
) -> None:
    async with gateway_client() as (rig, client):
        reply = await client.ask(asks(GOOD, response_format=named(schema)))
        assert (reply.status, reply.error["param"]) == (400, "response_format")
        assert words in reply.error["message"]
        form = {"type": "json_schema", "name": "x", "schema": schema}
        reply = await client.ask(response(text={"format": form}))
        assert (reply.status, reply.error["param"]) == (400, "text.format")
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        if "pattern" in json.dumps(schema):
            reply = await client.ask(post(chat(structural_tag=tag)))
            assert (reply.status, reply.error["param"]) == (400, "structural_tag")
        assert not rig.worker.asked
