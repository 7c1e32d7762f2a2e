"""An answer in one piece: the JSON of its parts as they come, and its body in pieces.

What comes is encoded in the turn in which it comes, so that nothing has to be built when the answer is whole, and what
waits is bytes and no objects: of a token what its text and its log probabilities take in the body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from attrs import define, field

from protocol.messages import Started
from protocol.text_messages import Accepted, Answered, ChoiceEnded, Text

PIECE_BYTES = 64 * 1024

_encode = msgspec.json.Encoder().encode


@define(eq=False)
class AnswerBody:
    """A body whose length is known, to be taken once: what has been taken is no longer kept."""

    _parts: deque[bytes | bytearray]
    size: int

    @classmethod
    def from_parts(cls, parts: Iterable[bytes | bytearray]) -> AnswerBody:
        """Return the body that consists of these parts."""
        kept = deque(parts)
        return cls(kept, sum(map(len, kept)))

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
class Choice:
    """One choice as far as it was told, as the insides of JSON strings and lists."""

    text: bytearray = field(factory=bytearray)
    ids: bytearray = field(factory=bytearray)
    logprobs: bytearray = field(factory=bytearray)
    ended: ChoiceEnded | None = None

    @property
    def reason(self) -> bytes:
        """How it ended, which it must have."""
        assert self.ended is not None
        return _encode(self.ended.reason)


class AnswerBuilder(ABC):
    """Takes the replies of one request, and makes the body of them."""

    def __init__(self, choices: int, *, ids: bool, logprobs: bool) -> None:
        self._ids, self._logprobs = ids, logprobs
        self._choices = [Choice() for _ in range(choices)]

    def add(self, reply: Accepted | Started | Text | ChoiceEnded) -> None:
        """Take the next reply, of whatever kind."""
        match reply:
            case Text():
                choice = self._choice(reply.choice)
                choice.text += _encode(reply.text)[1:-1]
                if self._ids and reply.ids:
                    extend(choice.ids, reply.ids)
                if self._logprobs and reply.logprobs:
                    self.add_logprobs(choice, reply)
            case ChoiceEnded():
                self._choice(reply.choice).ended = reply

    def whole(self) -> list[Choice]:
        """Return all the choices in their order; each must have ended, so that none looks whole that is not."""
        assert all(choice.ended is not None for choice in self._choices)
        return self._choices

    @abstractmethod
    def add_logprobs(self, choice: Choice, text: Text) -> None:
        """Take the log probabilities of the next piece of a choice."""

    @abstractmethod
    def finish(self, answered: Answered) -> AnswerBody:
        """Return the body of the whole answer."""

    def _choice(self, place: int) -> Choice:
        assert place < len(self._choices)
        return self._choices[place]


def extend(buffer: bytearray, entries: object) -> None:
    """Append what stands in a list to the inside of a JSON list."""
    inside = _encode(entries)[1:-1]
    if buffer and inside:
        buffer += b","
    buffer += inside
