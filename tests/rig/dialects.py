"""What the tests of several dialects share: hostile requests, checks of their errors, and strict readers of answers."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.dialects.http import error_body
from protocol.dialects.request_body import decode
from protocol.dialects.responses import CancelResponse, Create, read_event
from protocol.errors import BadRequest, RequestError
from protocol.messages.generation import FinishReason, Started
from protocol.messages.text import Answered, AnswerPiece, ChoiceEnded, Respond, Text, TokenText

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 1e308, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)

SCORED = [  # three pieces of text with log probabilities and token ids
    Text("He", 1, 0, (TokenText("He", b"He", -0.5, (("He", b"He", -0.5), ("Hi", b"Hi", float("-inf")))),), (7,)),
    Text("\u00e9", 2, 0, (TokenText("\ufffd", b"\xc3", -1.0), TokenText("\ufffd", b"\xa9", float("nan"))), (8, 9)),
    Text("", 0, 0, (), (10,)),
]
LISTED = [  # their log probabilities as chat completions and Responses have them
    {
        "token": "He",
        "logprob": -0.5,
        "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
            {"token": "Hi", "logprob": -9999.0, "bytes": [72, 105]},
        ],
    },
    {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": []},
    {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xA9], "top_logprobs": []},
]


def parse_event(text: str, *, default_model: str | None = None) -> Create | CancelResponse:
    """Return the event that a client sent, or raise a `RequestError` that lists all its mistakes."""
    return read_event(decode(text), default_model=default_model)


def check_answered_or_refused(
    value: object, base: dict[str, Any], parse: Callable[[bytes], Any], to_respond: Callable[..., Respond]
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


def check_refused(
    parse: Callable[..., object], data: object, kind: type[BadRequest], param: str | None, sentence: str | None = None
) -> str:
    """Check that data are refused by an error of this class, about this field; return its sentence.

    Keys whose value is `...` are left out.
    """
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if value is not ...}
    with pytest.raises(BadRequest) as raised:
        parse(json.dumps(data))
    assert (type(raised.value), raised.value.param) == (kind, param), raised.value
    assert sentence in {None, str(raised.value)}
    return str(raised.value)


def whole_body(
    builder: AnswerBuilder, replies: Iterable[Started | AnswerPiece | ChoiceEnded], answered: Answered
) -> bytes:
    """Return the body of the answer that consists of these replies."""
    for reply in replies:
        builder.add(reply)
    return b"".join(builder.finish(answered).pieces())


def extras(model: BaseModel) -> Iterator[str]:
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


def streamed(chunks: ChoiceChunks, replies: Sequence[Text | ChoiceEnded], answered: Answered) -> bytes:
    """Return the bytes that a gateway sends for these replies and their end."""
    sent = [chunks.text(reply) if isinstance(reply, Text) else chunks.choice_ended(reply) for reply in replies]
    return b"".join(sent) + chunks.finish(answered)
