"""An answer in one piece: the JSON of its parts as they come, and its body in pieces.

Each reply is encoded when it arrives, so that the end of a long answer does not block the event loop, and the memory of
an unfinished answer is bytes of its body and no objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from attrs import define, field

from protocol.dialects.weight_versions import version_members
from protocol.messages.generation import FinishReason, Started
from protocol.messages.text import Accepted, Answered, AnswerPiece, CallPart, ChoiceEnded, Reasoning, Text

PIECE_BYTES = 64 * 1024
CALLS_REASON = b'"tool_calls"'  # of a choice with calls that ended by itself

_encode = msgspec.json.Encoder().encode


@define(eq=False)
class AnswerBody:
    """A body of a fixed length that can be iterated once: a piece is not kept after it has been yielded."""

    _parts: deque[bytes | bytearray]
    size: int

    @classmethod
    def from_parts(cls, parts: Iterable[bytes | bytearray]) -> AnswerBody:
        """Return the body that consists of these parts."""
        queue = deque(parts)
        return cls(queue, sum(map(len, queue)))

    def pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces of at most `PIECE_BYTES`."""
        piece = bytearray()
        while self._parts:
            part = memoryview(self._parts.popleft())
            while part:
                room = PIECE_BYTES - len(piece)
                piece += part[:room]
                part = part[room:]
                if len(piece) == PIECE_BYTES:
                    yield bytes(piece)
                    piece.clear()
        if piece:
            yield bytes(piece)


@define(eq=False)
class ChoiceParts:
    """One choice as far as it has come, as the insides of JSON strings and lists."""

    text: bytearray = field(factory=bytearray)
    reasoning: bytearray = field(factory=bytearray)
    calls: bytearray = field(factory=bytearray)  # up to the arguments of the last one, in a dialect that has calls
    ids: bytearray = field(factory=bytearray)
    logprobs: bytearray = field(factory=bytearray)
    ended: ChoiceEnded | None = None

    @property
    def reason(self) -> bytes:
        """The JSON of its finish reason; it must have ended."""
        assert self.ended is not None
        if self.calls and self.ended.reason is FinishReason.STOP:
            return CALLS_REASON
        return _encode(self.ended.reason)

    @property
    def versions(self) -> bytes:
        """The JSON of the versions of its weights, behind other members; it must have ended."""
        assert self.ended is not None
        return version_members(self.ended.weight_versions)


class AnswerBuilder(ABC):
    """Collects the replies of one request, and builds the body of the answer from them."""

    def __init__(self, choices: int, *, ids: bool, logprobs: bool) -> None:
        self._ids, self._logprobs = ids, logprobs
        self._choices = [ChoiceParts() for _ in range(choices)]

    def add(self, reply: Accepted | Started | AnswerPiece | ChoiceEnded) -> None:
        """Add the next reply of any kind."""
        match reply:
            case Text():
                choice = self._choice(reply.choice)
                choice.text += _encode(reply.text)[1:-1]
                self._add_tokens(choice, reply)
            case Reasoning():
                choice = self._choice(reply.choice)
                choice.reasoning += _encode(reply.text)[1:-1]
                self._add_tokens(choice, reply)
            case CallPart():
                choice = self._choice(reply.choice)
                self.add_call(choice, reply)
                self._add_tokens(choice, reply)
            case ChoiceEnded():
                self._choice(reply.choice).ended = reply

    def whole(self) -> list[ChoiceParts]:
        """Return all choices in their order; each must have ended, so that no cut answer looks whole."""
        assert all(choice.ended is not None for choice in self._choices)
        return self._choices

    def _add_tokens(self, choice: ChoiceParts, reply: AnswerPiece) -> None:
        if self._ids and reply.ids:
            extend(choice.ids, reply.ids)
        if self._logprobs and reply.logprobs:
            self.add_logprobs(choice, reply)

    def add_call(self, choice: ChoiceParts, part: CallPart) -> None:
        """Add the next part of a call to a choice, in a dialect that has calls."""
        raise NotImplementedError

    @abstractmethod
    def add_logprobs(self, choice: ChoiceParts, text: AnswerPiece) -> None:
        """Add the log probabilities of the next piece of a choice."""

    @abstractmethod
    def finish(self, answered: Answered) -> AnswerBody:
        """Return the body of the whole answer."""

    def _choice(self, index: int) -> ChoiceParts:
        assert index < len(self._choices)
        return self._choices[index]


def extend(buffer: bytearray, entries: object) -> None:
    """Append the entries of a list to the inside of a JSON list."""
    inside = _encode(entries)[1:-1]
    if buffer and inside:
        buffer += b","
    buffer += inside
