"""Fields that would crash an engine, or that it would silently change, are refused by name on every endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from openai import OpenAI

from bench.rig.clients import ResponsesSocket
from bench.rig.node import MODEL, Node
from bench.rig.prompts import OAK_PROMPT
from tests.rig.gateway import TINY
from tests.system.sglang.test_options import MESSAGES, chat, post

pytestmark = pytest.mark.engine

APIS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": OAK_PROMPT},
    "/v1/responses": {"model": MODEL, "input": OAK_PROMPT},
    "socket": {"type": "response.create", "model": MODEL, "input": OAK_PROMPT},
}
MOST = {"/v1/chat/completions": "max_completion_tokens", "/v1/completions": "max_tokens"}
OF_RESPONSES = ("/v1/responses", "socket")

# What is sent beside the least of a request, and the field that the refusal must name; by door where they differ.
FOR_ALL: list[tuple[dict[str, object], str | None]] = [
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"3": "high"}}, "logit_bias"),
    ({"logit_bias": {"3": None}}, "logit_bias"),
    ({"logit_bias": {"three": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"logit_bias": [3]}, "logit_bias"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e999}, None),  # is no JSON
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 0.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"regex": "(", "max_tokens_": 1}, "max_tokens_"),
    ({"foo": 1}, "foo"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"lora_path": "x"}, "lora_path"),
    ({"bootstrap_room": 1}, "bootstrap_room"),
    ({"image_data": "x"}, "image_data"),
    ({"rid": 5}, "rid"),
    ({"top_logprobs": 513}, "top_logprobs"),
]


def refusal(port: int, api: str, extra: Mapping[str, object]) -> dict[str, Any]:
    """Ask through a door, and return the error that came."""
    body = {**APIS[api], **extra}
    if api != "socket":
        status, answer = post(port, api, body)
        assert 400 <= status < 500, (status, answer)
        error: dict[str, Any] = answer["error"]
        return error
    socket = ResponsesSocket(port)
    socket.send(body)
    outcome = socket.read()
    socket.close()
    assert outcome.error is not None
    assert outcome.status == 400, outcome
    return outcome.error


def pids(served: Node) -> dict[str, int]:
    return {role: seen.pid for role, seen in served.observe().items()}


@pytest.mark.parametrize("api", APIS)
def test_each_api_names_the_field_and_the_engine_lives(api: str, served: Node, client: OpenAI) -> None:
    before = pids(served)
    for extra, field in FOR_ALL:
        error = refusal(served.port, api, extra)
        assert field is None or str(error["param"]).startswith(field), (extra, error)
    assert pids(served) == before
    assert chat(client, max_tokens=2).choices[0].message.content


@pytest.mark.parametrize("api", APIS)
def test_lengths_are_refused_by_the_clients_own_name(api: str, served: Node) -> None:
    most = MOST.get(api, "max_output_tokens")
    for value in (0, -1, "many", 2**31, 1.5):
        assert refusal(served.port, api, {most: value})["param"] == most
    error = refusal(served.port, api, {most: 100_000})
    assert (error["code"], error["param"]) == ("context_length_exceeded", most)
    prompt = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}.get(api, "input")
    long = "word " * 3000
    error = refusal(served.port, api, {prompt: [{"role": "user", "content": long}] if prompt != "prompt" else long})
    assert (error["code"], error["param"]) == ("context_length_exceeded", prompt)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "bad", [{"regex": "(((["}, {"ebnf": "root ::= nothing"}, {"structural_tag": "{}"}, {"ebnf": "root ::= root"}]
)
def test_a_grammar_that_cannot_be_read_is_the_clients_mistake(
    api: str, bad: dict[str, str], served: Node, client: OpenAI
) -> None:
    before = pids(served)
    body = APIS[api] | dict[str, object](bad) | ({"stream": True} if api != "socket" else {})
    if api == "socket":
        socket = ResponsesSocket(served.port)
        socket.send(body)
        outcome = socket.read()
        socket.close()
        assert outcome.text == ""
        assert outcome.error is not None
        assert outcome.error.get("cause", outcome.error["code"]) == "invalid_request"
    else:
        status, answer = post_any(served.port, api, body)
        assert status == 400, (status, answer)
        assert b'"invalid_request"' in answer
    assert pids(served) == before
    assert chat(client, max_tokens=2).choices[0].message.content


def test_a_grammar_without_a_next_token_ends_its_own_answer_alone(served: Node, client: OpenAI) -> None:
    """If every token were forbidden, a scheduler that draws one, where it does not take the likeliest, would end."""
    before = pids(served)
    one, several = 'root ::= "a" rest\nrest ::= rest', 'root ::= "oak" rest | "fir" rest\nrest ::= rest "x"'
    end = {"logit_bias": {str(token): 100 for token in TINY.eos_token_ids}}  # likelier than any other, where all may be
    cases: list[dict[str, object]] = [
        {"ebnf": ebnf, "temperature": heat, **more} for ebnf in (one, several) for heat in (0, 1) for more in ({}, end)
    ]
    for case in (*cases, {"ebnf": one, "max_tokens": 2}):
        status, answer = post_any(served.port, "/v1/completions", {**APIS["/v1/completions"], **case})
        assert (status, b'"engine_refused"' in answer) == (400, True), (case, answer)
    schema = {"type": "json_schema", "json_schema": {"name": "endless", "schema": {"$ref": "#"}}}
    error = refusal(served.port, "/v1/chat/completions", {"response_format": schema, "temperature": 1})
    assert (error["param"], "no text" in error["message"]) == ("response_format", True), error
    assert pids(served) == before
    assert chat(client, max_tokens=2).choices[0].message.content


def post_any(port: int, path: str, body: object) -> tuple[int, bytes]:
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    payload = answer.read()
    connection.close()
    return answer.status, payload


def test_token_ids_that_would_crash_the_engine_are_refused(served: Node) -> None:
    before = pids(served)
    prompts: list[object] = [[512], [-1], [2**40], [2**63], [1.5], ["a", 1], [[1], "a"], [], [[]], ""]
    for prompt in prompts:
        error = refusal(served.port, "/v1/completions", {"prompt": prompt})
        assert error["param"].startswith("prompt"), (prompt, error)
    assert pids(served) == before


def test_what_is_not_done_here_is_refused_by_name(served: Node) -> None:
    cases: list[tuple[str, dict[str, object], str]] = [
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"store": True}, "store"),
        ("socket", {"reasoning": {"effort": "high"}}, "reasoning"),
        ("socket", {"n": 2}, "n"),
    ]
    for api, extra, field in cases:
        error = refusal(served.port, api, extra)
        assert error["param"].startswith(field), (api, extra, error)
