"""A fixed small share of the fuzzing, and tests of its checks. `make fuzz` plays two hundred thousand inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.dialects import chat, completions, embeddings, operations, reranking, responses, tokens
from protocol.errors import RequestError
from protocol.messages.operations import OPERATIONS as ENGINE_OPERATIONS
from supervisor.gateway.http.routes import ROUTES
from tests.rig.dialects import parse_event
from tests.system.fuzz import answers, bodies
from tests.system.fuzz.answers import Unfinished, Wrong
from tests.system.fuzz.inputs import make
from tests.system.fuzz.run import SHARE as FULL_SHARE
from tests.system.fuzz.run import run

SHARE, WITH_KEYS = 350, 170  # inputs
PARSERS: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": lambda body: chat.to_respond(chat.parse(body), request_id="r"),
    "/v1/completions": lambda body: completions.to_respond(completions.parse(body), request_id="r"),
    "/v1/responses": lambda body: responses.to_respond(responses.parse_http(body), request_id="r"),
    "/tokenize": lambda body: tokens.to_tokenize(tokens.parse_tokenize(body)),
    "/detokenize": lambda body: tokens.to_detokenize(tokens.parse_detokenize(body)),
    "/v1/embeddings": lambda body: embeddings.to_embed(embeddings.parse(body), request_id="r"),
    **dict.fromkeys(
        ("/v1/rerank", "/rerank", "/v2/rerank"),
        lambda body: reranking.rerank_texts(reranking.parse_rerank(body), request_id="r"),
    ),
    **dict.fromkeys(
        ("/v1/score", "/score"), lambda body: reranking.score_texts(reranking.parse_score(body), request_id="r")
    ),
    **{
        row.path: partial(operations.parse, row)
        for row in ENGINE_OPERATIONS
        if row.path is not None and row.has_fields and not row.takes_file
    },
}
OPERATIONS = {operation.path: operation for operation in ROUTES.operations if operation.request is not None}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = {
    path: sorted({*bodies.CHAT, *bodies.COMPLETION, *bodies.RESPONSE, "messages", "prompt", "input", "tokens"})
    for path in PARSERS
}


def test_every_input_gets_a_valid_answer_and_nothing_is_left() -> None:
    report = run(range(SHARE), seed=1)  # whose inputs are of every sort below
    assert report.problems == []
    assert report.counts["exact"] == SHARE / 50
    kinds = {kind: report.counts[kind] for kind in ("exchange", "event", "http", "websocket")}
    assert all(count > SHARE / 20 for count in kinds.values()), kinds
    assert {
        "status 200",
        "status 400",
        "status 404",
        "status 405",
        "status 501",
        "close 1002",
        "close 1007",
        "event response.completed",
    } <= report.counts.keys()


def test_a_gateway_with_keys_answers_as_well_and_refuses_clients_without_one() -> None:
    report = run(range(7 * FULL_SHARE, 7 * FULL_SHARE + WITH_KEYS))
    assert report.problems == []
    assert {"status 200", "status 401", "event response.completed"} <= report.counts.keys()


def test_an_input_is_made_from_its_number_alone() -> None:
    assert [make(number) for number in range(1, 40)] == [make(number) for number in range(1, 40)]
    assert make(3, seed=1) != make(3, seed=2)


def test_the_parser_of_every_request_is_attacked() -> None:
    assert PARSERS.keys() == OPERATIONS.keys(), "PARSERS of this file has the parser of each route with a body"


@pytest.mark.parametrize("path", PARSERS)
def test_every_body_is_parsed_or_refused(path: str) -> None:
    @settings(max_examples=20)
    @given(st.dictionaries(st.sampled_from(FIELDS[path]), JSON, max_size=3), st.integers(0, 999))
    def attack(fields: dict[Any, Any], seed: int) -> None:
        body = bodies.body(Random(seed), OPERATIONS[path]) | fields
        try:
            PARSERS[path](json.dumps(body).encode())
        except RequestError as error:
            message = str(error)
        else:
            message = "nothing"
        assert 0 < len(message) < answers.MESSAGE_CHARACTERS_MAX

    attack()


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    for parse in PARSERS.values():
        with pytest.raises(RequestError):
            parse(data)
    try:
        event = parse_event(data.decode("utf-8", "surrogateescape"))
    except RequestError:
        return
    assert isinstance(event, responses.CancelResponse)  # the only event that so few bytes can be


# The judge ------------------------------------------------------------------------------------------

HEAD = b"x-request-id: r\r\ndate: today\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 500 \r\n" + HEAD + b"content-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 \r\n" + HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 \r\n" + HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 \r\n" + HEAD + b"content-length: 3\r\n\r\nNaN",
        b"HTTP/1.1 200 \r\n" + HEAD + b"content-length: 13\r\n\r\n" + b'{"a":1,"a":2}',
        b"HTTP/1.1 200 \r\n" + HEAD + b"set-cookie: \x01\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 400 \r\n" + HEAD + b"content-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 \r\n" + HEAD + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 \r\ndate: today\r\ncontent-length: 2\r\n\r\n{}",
        b"half an answer",
    ],
)
def test_the_judge_detects_a_wrong_answer(data: bytes) -> None:
    with pytest.raises(Wrong):
        answers.take(data, ended=True)


def test_the_judge_accepts_a_right_answer_and_waits_for_the_rest_of_it() -> None:
    data = b"HTTP/1.1 200 \r\n" + HEAD + b"content-length: 2\r\n\r\n{}"
    answer, rest = answers.take(data + b"HTTP", ended=False)
    assert (answer.status, answer.json, rest) == (200, {}, b"HTTP")
    with pytest.raises(Unfinished):
        answers.take(data[:-1], ended=False)
