"""What chat completions and completions say alike: all that stands around the choices of an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec

from protocol.dialects.answer_builder import AnswerBody
from protocol.dialects.http import error_body
from protocol.dialects.options import ChoiceOptions
from protocol.errors import RequestError
from protocol.messages import Usage
from protocol.text_messages import Answered, ChoiceEnded, Text

_encode = msgspec.json.Encoder().encode


def shared(kind: str, answer_id: str, *, created: int, model: str) -> dict[str, object]:
    """Return what every chunk of an answer says, and so does an answer in one piece, whose `kind`s differ."""
    return {
        "id": answer_id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": None,
    }


class ChoiceChunks(ABC):
    """Builds the server-sent events of one answer: of each choice text... and its end, and then the end of all."""

    def __init__(self, request: ChoiceOptions, said: dict[str, object], *, choices: int) -> None:
        self._includes_usage = request.includes_usage
        self._ids = bool(request.return_token_ids)
        self._shared = said
        every = said | ({"usage": None} if self._includes_usage else {})
        self._head = b"data: " + _encode(every)[:-1] + b',"choices":[{"index":'
        self._unended = choices

    @abstractmethod
    def text(self, reply: Text) -> bytes:
        """Say the next piece of a choice."""

    @abstractmethod
    def choice_ended(self, ended: ChoiceEnded) -> bytes:
        """Say that a choice is whole, which makes one less that is not ended."""

    def finish(self, answered: Answered) -> bytes:
        """Say that the answer is whole, and what it cost if that was asked."""
        assert self._unended == 0  # else it would look whole and not be
        last = b""
        if self._includes_usage:
            last = b"data: " + b"".join(in_full(self._shared, (), answered).pieces()) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        """Say that the answer failed; no `[DONE]` follows, so that it never looks whole."""
        return b"data: " + error_body(error) + b"\n\n"


def in_full(said: dict[str, object], choices: Iterable[Iterable[bytes | bytearray]], answered: Answered) -> AnswerBody:
    """Return the body of what is shared, the choices, each as the inside of its object, and what they cost."""
    parts: list[bytes | bytearray] = [_encode(said)[:-1] + b',"choices":[']
    for place, choice in enumerate(choices):
        parts.append(b'%b{"index":%d,' % (b"," if place else b"", place))
        parts += choice
        parts.append(b"}")
    parts.append(b'],"usage":' + _encode(_usage(answered.usage)) + b"}")
    return AnswerBody.of(parts)


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
