"""The meaning of an answer's events in each dialect: tokens, the end, the usage, an error.

Servers differ, so everything that is not needed may be missing: a first event with a role alone, comments, usage, a
`[DONE]`. An answer is complete only if its end says so: by one of the `FINISHES` reasons, or by the last event of a
response.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from attrs import define

from bench.load.messages import Api, RequestFailed
from protocol.link.codec import DECODE_ERRORS

FINISHES = {"stop", "length", "tool_calls", "function_call", "content_filter"}
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
    response_id: str | None = None  # of a response, by which the next one can continue it

    def end(self) -> None:
        """Mark the end of the stream; raises `RequestFailed` if there was no finish reason."""
        if self.finish is None:
            raise RequestFailed("truncated", "no finish reason", f"the stream ended after {self.tokens} tokens")
        self.over = True


Reader = Callable[[Answer, bytes, bytes], bool]  # of one event's name and data; returns whether it has content


def read_chunk(answer: Answer, name: bytes, data: bytes) -> bool:
    """Read one chunk of a chat completion or of a completion."""
    if data == b"[DONE]":
        answer.end()
        return False
    chunk = _object(data)
    if chunk.get("error") or name == b"error":
        raise _error_event(chunk.get("error") or chunk)
    has_content = False
    for choice in _list(chunk, "choices"):
        delta = choice.get("delta") or choice
        if not isinstance(delta, dict):
            raise RequestFailed("shape", "delta", f"is {type(delta).__name__}")
        has_content = has_content or any(delta.get(key) for key in CONTENT)
        if (finish := choice.get("finish_reason")) is not None:
            _finish(answer, finish)
    if isinstance(usage := chunk.get("usage"), dict):
        _store_usage(answer, usage, "prompt_tokens", "completion_tokens")
    answer.tokens += has_content
    return has_content


def _finish(answer: Answer, finish: object) -> None:
    if not isinstance(finish, str) or finish not in FINISHES:
        raise RequestFailed("error_event", f"finish_reason {finish}", "the server says that the answer did not finish")
    answer.finish = finish


def read_response(answer: Answer, name: bytes, data: bytes) -> bool:
    """Read one event of a response."""
    if data == b"[DONE]":
        return False
    event = _object(data)
    kind = event.get("type", name.decode(errors="replace"))
    if not isinstance(kind, str):
        raise RequestFailed("shape", "type", f"is {type(kind).__name__}")
    if kind.endswith(".delta"):
        has_content = bool(event.get("delta"))
        answer.tokens += has_content
        return has_content
    match kind:
        case "error" | "response.error":
            raise _error_event(event.get("error") or event)
        case "response.completed" | "response.incomplete" | "response.failed" | "response.done" | "response.cancelled":
            response = event.get("response") or {}
            if not isinstance(response, dict):
                raise RequestFailed("shape", "response", f"is {type(response).__name__}")
            if isinstance(usage := response.get("usage"), dict):
                _store_usage(answer, usage, "input_tokens", "output_tokens")
            answer.response_id = str(response.get("id"))
            _end(answer, response, str(response.get("status") or kind.rpartition(".")[2]))
    return False


def _end(answer: Answer, response: Object, status: str) -> None:
    """End an answer by the status of its response."""
    if status == "failed":
        raise _error_event(response.get("error") or "failed")
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = "stop" if status == "completed" else None
    if status == "incomplete":
        finish = {"max_output_tokens": "length", "content_filter": "content_filter"}.get(str(reason))
    if finish is None:
        raise RequestFailed("error_event", f"{status} {reason}", "the server says that the response did not finish")
    answer.finish, answer.over = finish, True


def _store_usage(answer: Answer, usage: Object, prompt: str, output: str) -> None:
    details = usage.get(f"{prompt}_details")
    answer.prompt_tokens = _number(usage.get(prompt), answer.prompt_tokens)
    answer.output_tokens = _number(usage.get(output), answer.output_tokens)
    if isinstance(details, dict):
        answer.cached_tokens = _number(details.get("cached_tokens"), answer.cached_tokens)


def _number(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _error_event(error: object) -> RequestFailed:
    """Return the failure that an error event means."""
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
    values = chunk.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise RequestFailed("shape", key, f"{values!r} is no list of objects")
    return values


READERS: dict[Api, Reader] = {
    "responses-ws": read_response,
    "responses": read_response,
    "chat": read_chunk,
    "completions": read_chunk,
}
