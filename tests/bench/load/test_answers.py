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


def test_done_without_a_finish_reason_is_truncation() -> None:
    assert fault(read_chunk, delta("a"), b"[DONE]").kind == "truncated"
    assert fault(read_chunk, b"[DONE]").kind == "truncated"


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
