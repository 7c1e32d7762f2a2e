"""Answers of different servers give the same result, and an incomplete one never counts as complete."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.answers import Answer, Reader, read_chunk, read_response
from bench.load.http import http_fault
from bench.load.messages import Fault, RequestFailed
from tests.rig.scripted_server import delta, response_end, usage


def hear(read: Reader, *events: bytes | Mapping[str, Any]) -> tuple[Answer, int]:
    answer = Answer()
    brought = [read(answer, b"", e if isinstance(e, bytes) else json.dumps(e).encode()) for e in events]
    return answer, sum(brought)


def fault(read: Reader, *events: bytes | Mapping[str, Any]) -> Fault:
    with pytest.raises(RequestFailed) as caught:
        hear(read, *events)
    return caught.value.fault


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def test_a_chat_answer_is_counted_by_its_events_with_content() -> None:
    answer, brought = hear(read_chunk, ROLE, delta("a"), delta("b"), delta(finish="stop"), usage(5, 2), b"[DONE]")
    assert (answer.over, answer.finish, brought) == (True, "stop", 2)
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 2)


@pytest.mark.parametrize("body", [b"\xff", b'{"error":"\xe9"}', b"[" * 5000, b"{", b""])
def test_what_cannot_be_read_is_a_fault_of_one_request(body: bytes) -> None:
    assert http_fault(502, body).fault.code == "502"
    if body:
        assert fault(read_chunk, body).kind == fault(read_response, body).kind == "shape"


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning", "refusal"])
def test_every_kind_of_text_is_content(key: str) -> None:
    assert hear(read_chunk, {"choices": [{"delta": {key: "x"}}]})[1] == 1


def test_tool_calls_and_completions_are_content() -> None:
    assert hear(read_chunk, {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]})[1] == 1
    assert hear(read_chunk, {"choices": [{"text": "x", "finish_reason": None}]})[1] == 1


@pytest.mark.parametrize(
    "event",
    [
        {"choices": []},
        {"choices": None},
        {},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {}}], "usage": None},
        {"choices": [{"delta": {"content": None}}], "error": None},
        {"choices": [], "usage": {"completion_tokens": "many", "prompt_tokens": -1, "prompt_tokens_details": None}},
    ],
)
def test_what_brings_nothing_is_no_fault(event: dict[str, Any]) -> None:
    answer, brought = hear(read_chunk, event)
    assert (answer.over, brought, answer.output_tokens) == (False, 0, None)


def test_done_without_a_finish_reason_is_truncation() -> None:
    assert fault(read_chunk, delta("a"), b"[DONE]").kind == "truncated"
    assert fault(read_chunk, b"[DONE]").kind == "truncated"


@pytest.mark.parametrize("finish", ["abort", "error", "cancelled", {"type": "abort"}, ""])
def test_a_finish_reason_that_is_no_finish_fails(finish: str | dict[str, str]) -> None:
    assert fault(read_chunk, delta("a", finish)).kind == "error_event"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"error": {"code": "engine_died", "message": "x"}}, "engine_died"),
        ({"error": {"type": "server_error", "code": None}}, "server_error"),
        ({"error": "lost"}, "error"),
        ({"error": {"code": 500}, "choices": []}, "500"),
    ],
)
def test_an_error_in_mid_stream_fails_with_its_code(event: dict[str, Any], code: str) -> None:
    found = fault(read_chunk, delta("a"), event)
    assert (found.kind, found.code) == ("error_event", code)


def test_an_event_named_error_is_one_whatever_it_holds() -> None:
    with pytest.raises(RequestFailed):
        read_chunk(Answer(), b"error", b'{"message": "no"}')


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"3", b'{"choices": 3}', b'{"choices": [3]}', b'{"choices":[{"delta":3}]}', b"\xff"]
)
def test_another_shape_is_named_so(data: bytes) -> None:
    assert fault(read_chunk, data).kind == "shape"


# Responses --------------------------------------------------------------------------------

TEXT = {"type": "response.output_text.delta", "delta": "a"}


def test_a_response_is_counted_by_its_deltas() -> None:
    events = [
        {"type": "response.created"},
        TEXT,
        TEXT,
        {"type": "response.output_text.done"},
        response_end("completed", 2),
    ]
    answer, brought = hear(read_response, *events)
    assert (answer.over, answer.finish, brought) == (True, "stop", 2)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 2, 3)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("max_output_tokens", "length"), ("content_filter", "content_filter")],
)
def test_an_incomplete_response_says_why(reason: str, finish: str) -> None:
    end = response_end("incomplete", incomplete_details={"reason": reason})
    assert hear(read_response, end)[0].finish == finish


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (response_end("incomplete", incomplete_details={"reason": "tired"}), "incomplete tired"),
        (response_end("incomplete"), "incomplete None"),
        (response_end("incomplete", incomplete_details={"reason": "cancelled"}), "incomplete cancelled"),
        (response_end("failed", error={"code": "server_error", "message": "x"}), "server_error"),
        (response_end("failed", error={"code": "server_error", "cause": "link_lost"}), "link_lost"),
        ({"type": "error", "status": 503, "error": {"code": "overloaded"}}, "overloaded"),
        ({"type": "error", "code": "rate_limit", "message": "x"}, "rate_limit"),
    ],
)
def test_a_response_that_did_not_finish_has_failed(event: Mapping[Any, object], code: str) -> None:
    found = fault(read_response, TEXT, event)
    assert (found.kind, found.code) == ("error_event", code)


def test_a_response_without_usage_and_events_that_nobody_knows_are_no_fault() -> None:
    answer, brought = hear(read_response, {"type": "codex.rate_limits"}, {}, TEXT, {"type": "response.completed"})
    assert (answer.over, answer.output_tokens, brought) == (True, None, 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)
keys = st.sampled_from(["choices", "delta", "usage", "error", "type", "response", "finish_reason", "status", "text"])
types = st.sampled_from(["response.completed", "response.failed", "error", "x.delta", "response.incomplete"])
objects = st.recursive(
    values | types, lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=2), max_leaves=12
)


@given(objects, st.sampled_from([read_chunk, read_response]), st.sampled_from([b"", b"error", b"\xff"]))
def test_whatever_a_server_says_is_read_or_fails_as_a_request(
    document: object, read: Callable[..., Any], name: bytes
) -> None:
    answer = Answer()
    with suppress(RequestFailed):
        assert int(read(answer, name, json.dumps(document).encode())) == answer.tokens
        assert not answer.over or answer.finish is not None
