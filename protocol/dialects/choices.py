"""The answers of chat completions and of completions, which differ only in the JSON around the text of a choice.

Both list choices, and each choice has an index, its text, log probabilities, a finish reason and, if the client asked
for them, token ids. What they share is written here once, for a stream (`ChoiceChunks`) and for an answer in one piece
(`ChoicesBody`); a dialect adds the JSON around the text and its form of log probabilities. Chunks are put together from
bytes that are encoded once for each choice, because this runs for every piece of text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import msgspec

from protocol.dialects.answer_builder import AnswerBody, AnswerBuilder, ChoiceParts
from protocol.dialects.http import error_body
from protocol.dialects.options import ChoiceOptions
from protocol.dialects.weight_versions import version_members
from protocol.errors import RequestError
from protocol.messages.generation import Usage
from protocol.messages.text import Answered, AnswerPiece, ChoiceEnded, Text

_encode = msgspec.json.Encoder().encode


def common_fields(kind: str, answer_id: str, *, created: int, model: str) -> dict[str, object]:
    """Return the fields that all chunks of an answer have, or an answer in one piece; `kind` is their `object`."""
    return {"id": answer_id, "object": kind, "created": created, "model": model, "system_fingerprint": None}


class ChoiceChunks(ABC):
    """Server-sent events of one streamed answer: pieces of its choices, the end of each, and the end of the answer.

    `closing` is the JSON behind the text of a choice.
    """

    def __init__(
        self, request: ChoiceOptions, common: dict[str, object], *, choices: int, logprobs: bool, closing: bytes
    ) -> None:
        self._includes_usage = request.includes_usage
        self._logprobs, self._ids = logprobs, bool(request.return_token_ids)
        self._common = common
        chunk = common | ({"usage": None} if self._includes_usage else {})
        self._start = b"data: " + _encode(chunk)[:-1] + b',"choices":[{"index":'
        self._closing = closing
        self._plain_end = closing + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._heads: dict[int, bytes] = {}  # by choice that has begun: the JSON of its further chunks up to their text
        self._running = choices

    def piece(self, reply: AnswerPiece) -> bytes:
        """Return the chunks with the next piece of a choice, which is text in a dialect without other pieces."""
        assert isinstance(reply, Text)
        return self.text(reply)

    def text(self, reply: Text) -> bytes:
        """Return the chunk with the next piece of text of a choice."""
        head = self._heads.get(reply.choice) or self._begin(reply.choice)
        if not self._logprobs and not self._ids:
            return head + _encode(reply.text) + self._plain_end
        logprobs = _encode(self._logprobs_of(reply)) if self._logprobs else b"null"
        ids = b',"token_ids":' + _encode(reply.ids) if self._ids else b""
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b}]}\n\n' % (
            head,
            _encode(reply.text),
            self._closing,
            logprobs,
            ids,
        )

    def around_text(self) -> tuple[bytes, bytes] | None:
        """Return what `text` puts around the JSON of the text alone, for the first choice; None if there is more.

        None as well before the first piece, whose chunk differs.
        """
        head = self._heads.get(0)
        return None if head is None or self._logprobs or self._ids else (head, self._plain_end)

    def choice_ended(self, ended: ChoiceEnded) -> bytes:
        """Return the chunk that ends a choice."""
        self._running -= 1
        head, reason = self._last_head(ended.choice), self._reason(ended)
        versions = version_members(ended.weight_versions)
        return b'%b%b,"logprobs":null,"finish_reason":%b%b}]}\n\n' % (head, self._closing, reason, versions)

    def finish(self, answered: Answered) -> bytes:
        """Return the end of a whole answer, with its usage if the client asked for it."""
        assert self._running == 0  # else a cut answer would look whole
        last = b""
        if self._includes_usage:
            last = b"data: " + b"".join(_body(self._common, (), answered).pieces()) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        """Return the event of a failed answer; no `[DONE]` follows, so it does not look whole."""
        return b"data: " + error_body(error) + b"\n\n"

    def _reason(self, ended: ChoiceEnded) -> bytes:
        """Return the JSON of the reason for which a choice ended."""
        return _encode(ended.reason)

    @abstractmethod
    def _begin(self, choice: int) -> bytes:
        """Return the first chunk of a choice up to its text, and set the head of its further chunks."""

    @abstractmethod
    def _last_head(self, choice: int) -> bytes:
        """Return the last chunk of a choice, whose text is empty, up to `closing`."""

    @abstractmethod
    def _logprobs_of(self, reply: Text) -> object:
        """Return the log probabilities of a piece, for encoding."""


class ChoicesBody(AnswerBuilder):
    """The body of an answer in one piece; `around` is the JSON before and after the text of a choice."""

    def __init__(
        self,
        request: ChoiceOptions,
        common: dict[str, object],
        *,
        choices: int,
        logprobs: bool,
        around: tuple[bytes, bytes],
    ) -> None:
        super().__init__(choices, ids=bool(request.return_token_ids), logprobs=logprobs)
        self._common = common
        self._around = around

    def finish(self, answered: Answered) -> AnswerBody:
        """Return the body of the whole answer."""
        return _body(self._common, map(self._parts, range(len(self._choices)), self.whole()), answered)

    def _parts(self, index: int, choice: ChoiceParts) -> Iterator[bytes | bytearray]:
        yield from (*self._around_text(choice), b',"logprobs":')
        yield from self._logprobs_parts(index, choice) if self._logprobs else (b"null",)
        yield b',"finish_reason":' + choice.reason
        if self._ids:
            yield from (b',"token_ids":[', choice.ids, b"]")
        yield choice.versions

    def _around_text(self, choice: ChoiceParts) -> Iterable[bytes | bytearray]:
        """Return the text of a whole choice as JSON, in pieces."""
        before, after = self._around
        return (before, choice.text, after)

    @abstractmethod
    def _logprobs_parts(self, index: int, choice: ChoiceParts) -> Iterable[bytes | bytearray]:
        """Return the log probabilities of a whole choice as JSON, in pieces."""


def _body(common: dict[str, object], choices: Iterable[Iterable[bytes | bytearray]], answered: Answered) -> AnswerBody:
    """Return the body of an answer: the common fields, the choices, each as the inside of its object, and the usage."""
    parts: list[bytes | bytearray] = [_encode(common)[:-1] + b',"choices":[']
    for index, choice in enumerate(choices):
        parts.append(b'%b{"index":%d,' % (b"," if index else b"", index))
        parts += choice
        parts.append(b"}")
    parts.append(b'],"usage":' + _encode(_usage(answered.usage)) + b"}")
    return AnswerBody.from_parts(parts)


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
