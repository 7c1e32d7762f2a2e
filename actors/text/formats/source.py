"""The text of one choice as a parser of its format reads it, and the pieces that the parser makes of it.

A parser is a generator. It takes text from its source, and yields while it needs more: no result depends on where the
text was cut. Text in which a call may come is an *attempt*: it becomes a call as a whole, or remains text. So no client
ever gets a part of a call, and what is no call is not lost.

An attempt that fails becomes text up to the character at which it failed, and reading goes on behind that: each
character is read once, whatever a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

from attrs import define, field

from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece, TextPiece

T = TypeVar("T")

Reading: TypeAlias = Generator[None, None, T]
"""A step of a parser: it yields while it needs more text, and returns its result."""

ARGUMENTS_CHARACTERS_MAX = 16 * 1024  # of one piece: a call may have many

NEWLINE = "\n"


class NoCall(Exception):
    """The text of an attempt is no call; the source stands before the first character that cannot belong to one."""


@define(eq=False)
class Source:
    """The text that has come and is not yet in a piece."""

    ended: bool = False  # no more text comes
    cut: bool = False  # the text ended at its limit of tokens, not by itself
    watched: frozenset[str] | None = None  # see `Stage.watched`
    calls: int = 0  # the number of calls so far
    _text: str = ""  # not yet taken
    _taken: list[str] = field(factory=list)  # the texts of an attempt
    _taken_size: int = 0
    _pieces: list[Piece] = field(factory=list)

    # For a stage ---------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """The number of characters in no piece yet."""
        return len(self._text) + self._taken_size

    def add(self, text: str) -> None:
        """Add the next text."""
        self._text += text

    def take_pieces(self) -> Sequence[Piece]:
        """Return the pieces since the last call, those of one kind joined."""
        pieces, self._pieces = self._pieces, []
        return pieces

    # For a parser --------------------------------------------------------------------------

    def need(self, count: int) -> Reading[bool]:
        """Wait for so many characters; return whether there are as many."""
        while len(self._text) < count and not self.ended:
            self.watched = None
            yield
        return len(self._text) >= count

    def peek(self) -> Reading[str]:
        """Return the next character, without taking it; empty at the end."""
        yield from self.need(1)
        return self._text[:1]

    def starts_with(self, *options: str) -> Reading[str | None]:
        """Return the longest of these texts with which the text goes on, without taking it; None for none."""
        while True:
            text = self._text
            found = max((each for each in options if text.startswith(each)), key=len, default=None)
            open_ = (each for each in options if len(each) > len(text) and each.startswith(text))
            if self.ended or not any(found is None or len(each) > len(found) for each in open_):
                return found
            self.watched = None
            yield

    def accept(self, *options: str) -> Reading[str | None]:
        """Take the longest of these texts if the text goes on with one, and return it."""
        found = yield from self.starts_with(*options)
        if found is not None:
            self.take(len(found))
        return found

    def expect(self, *options: str) -> Reading[str]:
        """Take one of these texts; raises `NoCall` if the text goes on with none."""
        if (found := (yield from self.accept(*options))) is None:
            raise NoCall
        return found

    def run(self, characters: str, most: int | None = None) -> Reading[str]:
        """Take and return the longest run of these characters, at most `most` of them."""
        parts = list[str]()
        while True:
            limit = len(self._text) if most is None else min(most, len(self._text))
            size = next((index for index in range(limit) if self._text[index] not in characters), limit)
            parts.append(self.take(size))
            most = None if most is None else most - size
            if self._text or self.ended or most == 0:
                return "".join(parts)
            self.watched = None
            yield

    def until(self, *ends: str) -> Reading[tuple[str, str | None]]:
        """Take the text up to the first of these texts, and that one; return both, None for the second at the end.

        Where several begin at one character, it is the longest.
        """
        parts = list[str]()
        while True:
            place, found, certain = self._find(ends)
            if found is not None:
                parts.append(self.take(place))
                self.take(len(found))
                return "".join(parts), found
            parts.append(self.take(certain))
            if self.ended:
                return "".join(parts), None
            self.watched = None
            yield

    def pass_until(self, make: type[TextPiece | ReasoningPiece], *ends: str, trimmed: str = "") -> Reading[str | None]:
        """Pass the text on in pieces up to the first of these texts; take and return that one, None at the end.

        A run of the characters in `trimmed` directly before an end is left out.
        """
        watched = frozenset({*trimmed, *(end[0] for end in ends)}) if make is TextPiece else None
        while True:
            place, found, certain = self._find(ends)
            if found is not None:
                kept = len(self._text[:place].rstrip(trimmed)) if trimmed else place
                self.pass_on(make, kept)
                self._drop(place - kept + len(found))
                return found
            if self.ended:
                self.pass_on(make, len(self._text))
                return None
            # What is trimmed before an end may stand before the beginning of one, too.
            self.pass_on(make, len(self._text[:certain].rstrip(trimmed)) if trimmed else certain)
            self.watched = watched
            yield

    def size_of(self, pattern: re.Pattern[str]) -> int:
        """Return the size of what a pattern matches at the beginning of the text that has come."""
        found = pattern.match(self._text)
        return 0 if found is None else found.end()

    def skip(self, characters: str) -> Reading[None]:
        """Leave out a run of these characters."""
        while True:
            self._text = self._text.lstrip(characters)
            if self._text or self.ended:
                return
            self.watched = None
            yield

    def begin(self, marker: str) -> None:
        """Begin an attempt with a marker that has been taken."""
        self._taken.append(marker)
        self._taken_size += len(marker)

    def take(self, size: int) -> str:
        """Take so many characters of those that have come, as a part of the attempt."""
        text, self._text = self._text[:size], self._text[size:]
        if text:
            self._taken.append(text)
            self._taken_size += len(text)
        return text

    def pass_on(self, make: type[TextPiece | ReasoningPiece], size: int) -> None:
        """Take so many characters of those that have come as a piece."""
        text, self._text = self._text[:size], self._text[size:]
        self.put(make, text)

    def put(self, make: type[TextPiece | ReasoningPiece], text: str) -> None:
        """Make a piece of a text."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if type(last) is make:
            self._pieces[-1] = make(last.text + text)
        else:
            self._pieces.append(make(text))

    def call(self, name: str, arguments: str) -> None:
        """Make a call of what was taken since the attempt began."""
        self.forget()
        first, rest = arguments[:ARGUMENTS_CHARACTERS_MAX], arguments[ARGUMENTS_CHARACTERS_MAX:]
        self._pieces.append(CallPiece(self.calls, name, first))
        while rest:
            first, rest = rest[:ARGUMENTS_CHARACTERS_MAX], rest[ARGUMENTS_CHARACTERS_MAX:]
            self._pieces.append(CallPiece(self.calls, arguments=first))
        self.calls += 1

    def forget(self) -> None:
        """Leave out what was taken since the attempt began, such as a marker."""
        self._taken.clear()
        self._taken_size = 0

    def fail(self) -> None:
        """End an attempt that is no call: its text is text, unless it was cut off at the end."""
        if self.ended and not self._text and self.cut:
            self.forget()
        else:
            text = "".join(self._taken)
            self.forget()
            self.put(TextPiece, text)

    def _drop(self, size: int) -> None:
        self._text = self._text[size:]

    def _find(self, ends: Iterable[str]) -> tuple[int, str | None, int]:
        """Return the place of the first end and the end, and how many characters certainly come before any."""
        text = self._text
        places = [(place, -len(end), end) for end in ends if (place := text.find(end)) >= 0]
        certain = len(text) if self.ended else len(text) - max((_open(text, end) for end in ends), default=0)
        # An end that has begun earlier, or a longer one at the same place, would come first.
        if places and min(places)[0] < certain:
            place, _, end = min(places)
            return place, end, place
        return -1, None, certain


def _open(text: str, end: str) -> int:
    """Return the size of the longest end of a text with which `end` may begin, without being complete."""
    sizes = range(min(len(text), len(end) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(end[:size])), 0)
