"""The text of one choice as a parser of its format reads it, and the pieces that the parser makes of it.

A parser is a generator. It takes text from its source, and yields while it needs more: no result depends on where the
text was cut. Text in which a call may come is an *attempt*: it becomes a call as a whole, or remains text. So no client
ever gets a part of a call, and what is no call is not lost.

An attempt that fails becomes text up to the character of the failure, and reading goes on behind it. So each character
is read once, whatever a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from attrs import define, field, frozen

from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece, TextPiece

T = TypeVar("T")

Reading: TypeAlias = Generator[None, None, T]
"""A step of a parser: it yields while it needs more text, and returns its result."""

ARGUMENTS_CHARACTERS_MAX = 16 * 1024  # of one piece: a call may have many

NEWLINE = "\n"
CUT_MARKER_MIN = 4  # characters of a marker that was cut: fewer may be anything
TRIMMED_MAX = 16  # characters: all that are held back are looked at whenever text comes


class NoCall(Exception):
    """The text of an attempt is no call; the source stands before the first character that cannot belong to one."""


@define(eq=False)
class Source:
    """The text that has come and is not yet in a piece."""

    ended: bool = False  # no more text comes
    cut: bool = False  # the text ended at its limit of tokens, not by itself
    watched: frozenset[str] | None = None  # see `Stage.watched`
    calls: int = 0  # the number of calls so far
    thought_end: str | None = None  # see `Stage.thought_end`
    claimed: bool = True  # the attempt claims to be a call: a cut leaves it out
    # The text behind `_place` is not yet taken. Cutting off each part would copy all text behind it.
    _text: str = ""
    _place: int = 0
    _taken: list[str] = field(factory=list)  # the texts of an attempt
    _taken_size: int = 0
    _trimmed: str = ""  # left out before the last end that `pass_until` found
    _pieces: list[Piece] = field(factory=list)
    _parts: list[str] = field(factory=list)  # of the last piece, of this kind
    _kind: type[TextPiece | ReasoningPiece] = TextPiece

    # For a stage ---------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """The number of characters in no piece yet."""
        return self._come + self._taken_size

    def add(self, text: str) -> None:
        """Add the next text."""
        self._text, self._place = f"{self._text[self._place :]}{text}", 0

    def take_pieces(self) -> Sequence[Piece]:
        """Return the pieces since the last call, those of one kind joined."""
        self._join()
        pieces, self._pieces = self._pieces, []
        return pieces

    # For a parser --------------------------------------------------------------------------

    def need(self, count: int) -> Reading[bool]:
        """Wait for so many characters; return whether there are as many."""
        while self._come < count and not self.ended:
            self.watched = None
            yield
        return self._come >= count

    def peek(self) -> Reading[str]:
        """Return the next character, without taking it; empty at the end."""
        yield from self.need(1)
        return self._text[self._place : self._place + 1]

    def starts_with(self, *options: str) -> Reading[str | None]:
        """Return the longest of these texts with which the text goes on, without taking it; None for none."""
        size = max(map(len, options), default=0)
        while True:
            text = self._text[self._place : self._place + size]
            if text and not any(each[0] == text[0] for each in options):
                return None
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
            # The end of the text may have cut one off, which then belongs to the attempt.
            if self.ended and any(each.startswith(self._text[self._place :]) for each in options):
                self.take(self._come)
            raise NoCall
        return found

    def close(self, space: str, *ends: str) -> Reading[str | None]:
        """Leave out the longest of these end markers behind a call, and a run of `space` before it, and return that.

        Without any of them, the run is text.
        """
        yield from self.run(space)
        try:
            found = yield from self.expect(*ends)
        except NoCall:
            self.fail()
            return None
        self.forget()
        return found

    def run(self, characters: str, most: int | None = None) -> Reading[str]:
        """Take and return the longest run of these characters, at most `most` of them."""
        if self._come and self._text[self._place] not in characters:
            return ""
        parts = list[str]()
        while True:
            parts.append(part := self.take(self._run_size(characters, most)))
            most = None if most is None else most - len(part)
            if self._come or self.ended or most == 0:
                return "".join(parts)
            self.watched = None
            yield

    def run_without(self, characters: str, most: int) -> Reading[str]:
        """Take and return the longest run of other characters than these, at most `most` of them."""
        parts = list[str]()
        while True:
            limit = min(len(self._text), self._place + most)
            end = next((place for place in range(self._place, limit) if self._text[place] in characters), limit)
            parts.append(part := self.take(end - self._place))
            most -= len(part)
            if self._come or self.ended or most == 0:
                return "".join(parts)
            self.watched = None
            yield

    def until(self, *ends: str) -> Reading[tuple[str, str | None]]:
        """Take the text up to the first of these texts, and that one; return both, None for the second at the end.

        Where several begin at one character, it is the longest.
        """
        parts = list[str]()
        while True:
            size, found = self._find(ends)
            parts.append(self.take(size))
            if found is not None:
                self.take(len(found))
            if found is not None or self.ended:
                return "".join(parts), found
            self.watched = None
            yield

    def pass_until(self, make: type[TextPiece | ReasoningPiece], *ends: str, trimmed: str = "") -> Reading[str | None]:
        """Pass the text on in pieces up to the first of these texts; take and return that one, None at the end.

        A run of the characters in `trimmed` directly before an end is left out, the last `TRIMMED_MAX` of them.
        """
        watched = frozenset({*trimmed, *(end[0] for end in ends)}) if make is TextPiece else None
        while True:
            size, found = self._find(ends)
            if self.ended and found is None:
                cut = self._cut_size(ends)
                self.pass_on(make, size - cut - (self._trimmed_size(size - cut, trimmed) if cut else 0))
                self._place = len(self._text)
                return None
            # What is trimmed before an end may stand before the beginning of one, too.
            kept = size - self._trimmed_size(size, trimmed)
            self.pass_on(make, kept)
            if found is not None:
                self._trimmed = self._next(size - kept)
                self._next(len(found))
                return found
            self.watched = watched
            yield

    def size_of(self, pattern: re.Pattern[str]) -> int:
        """Return the size of a pattern's match at the beginning of the text so far."""
        found = pattern.match(self._text, self._place)
        return 0 if found is None else found.end() - self._place

    def skip(self, characters: str) -> Reading[None]:
        """Leave out a run of these characters."""
        while True:
            self._place += self._run_size(characters)
            if self._come or self.ended:
                return
            self.watched = None
            yield

    def begin(self, marker: str) -> None:
        """Begin an attempt with a marker, and with the characters that `pass_until` trimmed before it."""
        self._taken += (self._trimmed, marker)
        self._taken_size += len(self._trimmed) + len(marker)
        self._trimmed = ""

    @property
    def mark(self) -> int:
        """The number of texts that were taken for the attempt."""
        return len(self._taken)

    def between(self, begin: int, end: int) -> str:
        """Return what was taken for the attempt from one mark to another."""
        return "".join(self._taken[begin:end])

    def take(self, size: int) -> str:
        """Take so many of the next characters as a part of the attempt."""
        if text := self._next(size):
            self._taken.append(text)
            self._taken_size += len(text)
        return text

    def pass_on(self, make: type[TextPiece | ReasoningPiece], size: int) -> None:
        """Take so many of the next characters as a piece."""
        self.put(make, self._next(size))

    def put(self, make: type[TextPiece | ReasoningPiece], text: str) -> None:
        """Make a piece of a text."""
        if not text:
            return
        if make is not self._kind:
            self._join()
            self._kind = make
        self._parts.append(text)

    def call(self, name: str, arguments: str) -> None:
        """Make a call of what was taken since the attempt began."""
        self.forget()
        self._join()
        first, rest = arguments[:ARGUMENTS_CHARACTERS_MAX], arguments[ARGUMENTS_CHARACTERS_MAX:]
        self._pieces.append(CallPiece(self.calls, name, first))
        while rest:
            first, rest = rest[:ARGUMENTS_CHARACTERS_MAX], rest[ARGUMENTS_CHARACTERS_MAX:]
            self._pieces.append(CallPiece(self.calls, arguments=first))
        self.calls += 1

    def forget(self) -> None:
        """Leave out what was taken since the attempt began, such as a marker."""
        self._taken.clear()
        self._taken_size, self.claimed = 0, True

    def put_back(self) -> None:
        """Give back the text of the attempt, to be read again."""
        self._text, self._place = f"{''.join(self._taken)}{self._text[self._place :]}", 0
        self.forget()

    def fail(self, make: type[TextPiece | ReasoningPiece] = TextPiece) -> None:
        """End an attempt that is no call: its text becomes a piece, unless it claims to be a call and was cut off."""
        if self.ended and not self._come and self.cut and self.claimed:
            self.forget()
        else:
            text = "".join(self._taken)
            self.forget()
            self.put(make, text)

    @property
    def _come(self) -> int:
        """The number of characters that have come and are not taken."""
        return len(self._text) - self._place

    def _next(self, size: int) -> str:
        begin, self._place = self._place, min(self._place + size, len(self._text))
        return self._text[begin : self._place]

    def _join(self) -> None:
        if self._parts:
            self._pieces.append(self._kind("".join(self._parts)))
            self._parts.clear()

    def _run_size(self, characters: str, most: int | None = None) -> int:
        """Return how many of the next characters are of these."""
        begin, limit = self._place, len(self._text)
        if most is not None:
            limit = min(limit, begin + most)
        return next((place for place in range(begin, limit) if self._text[place] not in characters), limit) - begin

    def _trimmed_size(self, size: int, trimmed: str) -> int:
        """Return how many of the next `size` characters are trimmed at their end."""
        if not trimmed:
            return 0
        end = self._place + size
        last = self._text[max(self._place, end - TRIMMED_MAX) : end]
        return len(last) - len(last.rstrip(trimmed))

    def _cut_size(self, ends: tuple[str, ...]) -> int:
        """Return how many of the last characters begin an end, where the text was cut within it."""
        if not self.cut or not ends:
            return 0
        size = len(self._text) - _search(ends).certain(self._text, self._place)
        return size if size >= CUT_MARKER_MIN else 0

    def _find(self, ends: tuple[str, ...]) -> tuple[int, str | None]:
        """Return how many characters certainly come before the first end, and that end if it has come."""
        if not ends:
            return self._come, None
        search = _search(ends)
        certain = len(self._text) if self.ended else search.certain(self._text, self._place)
        # An end that has begun earlier, or a longer one at the same place, would come first.
        if (found := search.pattern.search(self._text, self._place)) is not None and found.start() < certain:
            return found.start() - self._place, found[0]
        return certain - self._place, None


@frozen
class _Search:
    """A search for the first of several texts in one pass, whichever of them are missing."""

    pattern: re.Pattern[str]
    firsts: frozenset[str]  # the first character of each
    beginnings: frozenset[str]  # of each, without the whole
    size_max: int  # of a beginning

    def certain(self, text: str, place: int) -> int:
        """Return the first place at which one of the texts may have begun and is incomplete, else the end."""
        begin = max(place, len(text) - self.size_max)
        if self.firsts.isdisjoint(text[begin:]):
            return len(text)
        return next((each for each in range(begin, len(text)) if text[each:] in self.beginnings), len(text))


@lru_cache(maxsize=256)
def _search(ends: tuple[str, ...]) -> _Search:
    longest_first = sorted(ends, key=len, reverse=True)
    return _Search(
        re.compile("|".join(map(re.escape, longest_first))),
        frozenset(end[0] for end in ends),
        frozenset(end[:size] for end in ends for size in range(1, len(end))),
        len(longest_first[0]) - 1,
    )
