"""The meaning of an answer's events in each dialect: tokens, the end, the usage, an error.

Servers differ, so everything that is not needed may be missing: a first event with a role alone, comments, usage, a
`[DONE]`. What an answer must have to count as whole is an end that says so: a finish reason that means a finish, or
the last event of a response.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from attrs import define

from bench.load.faults import RequestFailed
from bench.load.messages import Api
from protocol.codec import DECODE_ERRORS

FINISHES = {"stop", "length", "tool_calls", "function_call", "content_filter"}
CANCELLED = "cancelled"
CONTENT = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "text")

Object = dict[str, object]
_decode = msgspec.json.Decoder().decode


@define
class Answer:
    """The state of one answer that is being read."""

    finish: str | None = None
    over: bool = False  # its last event has come
    tokens: int = 0  # counted from its events
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    running_usage: bool | None = None  # whether its events say how many tokens there are so far; None before the first

    def ended(self) -> None:
        """Take the end of the stream; raises `RequestFailed` unless the answer is whole."""
        if self.finish is None:
            raise RequestFailed("truncated", "no finish reason", f"the stream ended after {self.tokens} tokens")
        self.over = True


Reader = Callable[[Answer, bytes, bytes], int]  # takes one event's name and data; returns how many tokens it brings


def read_chunk(answer: Answer, name: bytes, data: bytes) -> int:
    """Read one chunk of a chat completion or of a completion."""
    if data == b"[DONE]":
        answer.ended()
        return 0
    chunk = _object(data)
    if chunk.get("error") or name == b"error":
        raise _said(chunk.get("error") or chunk)
    has_content = False
    for choice in _list(chunk, "choices"):
        delta = choice.get("delta") or choice
        if not isinstance(delta, dict):
            raise RequestFailed("shape", "delta", f"is {type(delta).__name__}")
        has_content = has_content or any(delta.get(key) for key in CONTENT)
        if (finish := choice.get("finish_reason")) is not None:
            _finish(answer, finish)
    usage = chunk.get("usage")
    counted = _use(answer, usage, "prompt_tokens", "completion_tokens") if isinstance(usage, dict) else None
    return _count(answer, counted) if has_content else 0


def _count(answer: Answer, counted: int | None) -> int:
    """Return how many tokens an event with content brings: one, unless its usage has been counting from the first."""
    if answer.running_usage is None:
        answer.running_usage = counted is not None
    brings = 1
    if answer.running_usage and counted is not None:
        brings = max(1, counted - answer.tokens)
    answer.tokens += brings
    return brings


def _finish(answer: Answer, finish: object) -> None:
    if not isinstance(finish, str) or finish not in FINISHES:
        raise RequestFailed("error_event", f"finish_reason {finish}", "the server says that the answer did not finish")
    answer.finish = finish


def read_response(answer: Answer, name: bytes, data: bytes) -> int:
    """Read one event of a response."""
    if data == b"[DONE]":
        return 0
    event = _object(data)
    kind = event.get("type", name.decode(errors="replace"))
    if not isinstance(kind, str):
        raise RequestFailed("shape", "type", f"is {type(kind).__name__}")
    if kind.endswith(".delta"):
        return _count(answer, None) if event.get("delta") else 0
    match kind:
        case "error" | "response.error":
            raise _said(event.get("error") or event)
        case "response.completed" | "response.incomplete" | "response.failed" | "response.done" | "response.cancelled":
            response = event.get("response") or {}
            if not isinstance(response, dict):
                raise RequestFailed("shape", "response", f"is {type(response).__name__}")
            if isinstance(usage := response.get("usage"), dict):
                _use(answer, usage, "input_tokens", "output_tokens")
            _end(answer, response, str(response.get("status") or kind.rpartition(".")[2]))
    return 0


def _end(answer: Answer, response: Object, status: str) -> None:
    """Take the last event of a response by its status."""
    if status == "failed":
        raise _said(response.get("error") or "failed")
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = {"completed": "stop", "cancelled": CANCELLED}.get(status)
    if status == "incomplete":
        finish = {"max_output_tokens": "length", "content_filter": "content_filter", CANCELLED: CANCELLED}.get(
            str(reason)
        )
    if finish is None:
        raise RequestFailed("error_event", f"{status} {reason}", "the server says that the response did not finish")
    answer.finish, answer.over = finish, True


def _use(answer: Answer, usage: Object, prompt: str, output: str) -> int | None:
    """Note a usage; return its count of output tokens."""
    details = usage.get(f"{prompt}_details")
    answer.prompt_tokens = _number(usage.get(prompt), answer.prompt_tokens)
    answer.output_tokens = _number(usage.get(output), answer.output_tokens)
    if isinstance(details, dict):
        answer.cached_tokens = _number(details.get("cached_tokens"), answer.cached_tokens)
    return _number(usage.get(output), None)


def _number(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _said(error: object) -> RequestFailed:
    """Name an error as the server has said it."""
    if not isinstance(error, dict):
        return RequestFailed("error_event", "error", error)
    code = error.get("cause") or error.get("code") or error.get("type") or "error"
    return RequestFailed("error_event", code, error.get("message", error))


def _object(data: bytes) -> Object:
    try:
        decoded = _decode(data)
    except DECODE_ERRORS as error:
        raise RequestFailed("shape", "not JSON", f"{error}: {data[:100]!r}") from error
    if not isinstance(decoded, dict):
        raise RequestFailed("shape", "no object", f"{data[:100]!r}")
    return decoded


def _list(chunk: Object, key: str) -> list[Object]:
    found = chunk.get(key) or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise RequestFailed("shape", key, f"{found!r} is no list of objects")
    return found


READERS: dict[Api, Reader] = {
    "responses-ws": read_response,
    "responses": read_response,
    "chat": read_chunk,
    "completions": read_chunk,
}
