"""Clients of several dialects, for their tests: one that may send any JSON, and one that reads strictly."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol.dialects.chat import ChatRequest
from protocol.dialects.completions import CompletionRequest
from protocol.dialects.http import error_body
from protocol.errors import RequestError
from protocol.messages import FinishReason
from protocol.text_messages import Answered, ChoiceEnded, Respond, Text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def check_answered_or_refused(
    value,
    base: dict[str, Any],
    parse: Callable[[bytes], ChatRequest | CompletionRequest],
    to_respond: Callable[..., Respond],
) -> None:
    """Check that a value, alone or merged into a valid request, is either accepted or refused with a `RequestError`."""
    for data in (value, base | value if isinstance(value, dict) else value):
        try:
            result = parse(json.dumps(data).encode())
        except RequestError as error:
            json.loads(error_body(error))
        else:
            respond = to_respond(result, request_id="0123456789abcdef0123456789abcdef")
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(respond), type=Respond) == respond


def extras(model):
    """Return every key that the types of the `openai` package do not declare."""
    for name, value in dict(model).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from (f"{name}.{key}" for key in extras(each))
    yield from model.model_extra or ()


def response_event_types(deltas: int) -> list[str]:
    """Return the types of a complete response's events, in their order."""
    return [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def events(stream: bytes) -> list[bytes]:
    """Split a stream into events as the strictest client does: `data: ` lines alone, each followed by an empty one."""
    *lines, rest = stream.split(b"\n\n")
    assert rest == b""
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [line.removeprefix(b"data: ") for line in lines]


def ended(choice: int = 0, reason: FinishReason = FinishReason.STOP) -> ChoiceEnded:
    return ChoiceEnded(reason, choice)


def streamed(chunks, replies, answered: Answered):
    """Return the bytes that a gateway sends for these replies and their end."""
    said = [chunks.text(each) if isinstance(each, Text) else chunks.choice_ended(each) for each in replies]
    return b"".join(said) + chunks.finish(answered)
