"""A stage between the text of an answer and its client: it divides text into the answer, reasoning and calls.

A model writes all three into one text and sets them apart by markers of its own format. A stage reads that text as it
comes, behind stop strings. It holds text back only while the text may be the beginning of a marker. Any cut of a text
into calls of `feed` yields the same pieces, once pieces of the same kind are joined.

A token with text of its own may skip its stage (see `Stage.watched`), so an answer without markers costs nothing here.
A stage reads no token ids: an answer that goes on at another engine is one text to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from attrs import frozen


@frozen
class TextPiece:
    """A piece of the answer itself."""

    text: str


@frozen
class ReasoningPiece:
    """A piece of the reasoning that comes before or between the parts of an answer."""

    text: str


@frozen
class CallPiece:
    """A part of a call of a function: `name` in its first part, then `arguments`, joined the JSON text of an object.

    Calls of a choice are numbered from 0 by `index`, and do not overlap. All parts of a call come at once, when it is
    whole.
    """

    index: int
    name: str = ""
    arguments: str = ""


Piece: TypeAlias = TextPiece | ReasoningPiece | CallPiece


class Stage(Protocol):
    """The state of one choice in its format."""

    @property
    def held(self) -> int:
        """The number of characters held back: the last that were fed, without a piece yet."""

    @property
    def watched(self) -> frozenset[str] | None:
        """The characters that `feed` has to get, such as the first of a marker; None while it has to get all text.

        While this is a set and nothing is held back, text without these characters passes through unchanged: it may
        skip `feed`, and no later piece may depend on it. Empty, it lets all text pass.
        """

    @property
    def thought_end(self) -> str | None:
        """The text that would end the reasoning in which the text is; None outside of reasoning."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Take the next text; return the pieces that are certain now."""

    def end(self, *, cut: bool = False) -> Sequence[Piece]:
        """Return the pieces that were held back; the text may end anywhere, even within a marker.

        Of a text that was `cut` at its limit of tokens, the beginning of a call is left out; of one that ended by
        itself, it is text.
        """


@frozen
class Plain:
    """The stage of a format without markers: all text is the answer."""

    held: int = 0
    watched: frozenset[str] | None = frozenset()
    thought_end: str | None = None

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the text."""
        return (TextPiece(text),)

    def end(self, *, cut: bool = False) -> Sequence[Piece]:  # noqa: ARG002
        """Return nothing."""
        return ()


PLAIN = Plain()
