"""The answer of most formats: text, with reasoning between two markers and calls behind a marker.

A format of reasoning is a pair of markers (`Thought`). A format of calls (`CallFormat`) knows with which markers its
calls begin, and reads them. The two are chosen for each model, and either may be missing.

A thought begins before the first text of an answer, or directly behind a call or another thought. Elsewhere its marker
is text, which an answer may quote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import define, field, frozen

from actors.text.formats.json_text import SPACE
from actors.text.formats.source import NEWLINE, NoCall, Reading, Source
from actors.text.formats.stage import Piece, ReasoningPiece, TextPiece
from actors.text.formats.tool_table import ToolTable


@frozen
class Thought:
    """The markers of reasoning; line breaks between a marker and what it is next to belong to neither."""

    begin: str
    end: str
    other_begins: tuple[str, ...] = ()  # that models write in place of `begin`
    other_ends: tuple[str, ...] = ()
    ended_by: tuple[str, ...] = ()  # markers of calls that end it too, if they begin a call
    parts: tuple[str, ...] = ()  # of markers, that may be special tokens

    @property
    def begins(self) -> tuple[str, ...]:
        """All markers with which reasoning begins."""
        return (self.begin, *self.other_begins)

    @property
    def ends(self) -> tuple[str, ...]:
        """All markers with which reasoning ends."""
        return (self.end, *self.other_ends)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers, any of which may be a special token of a model's tokenizer."""
        return (*self.begins, *self.ends, *self.parts)


@frozen
class Expected:
    """The tools that an answer may call, and whether it begins within reasoning."""

    tools: ToolTable = ToolTable()
    thinking: bool = False  # the prompt ends within reasoning


@runtime_checkable
class WholeFormat(Protocol):
    """A format of a whole answer, in which text, reasoning and calls have markers of one kind."""

    @property
    def markers(self) -> Sequence[str]:
        """All markers, any of which may be a special token: a tokenizer leaves those out unless it is told not to."""

    @property
    def thought_begins(self) -> Sequence[str]:
        """The markers with which reasoning begins."""

    @property
    def thought_ends(self) -> Sequence[str]:
        """The markers with which reasoning ends."""

    def read_whole(self, source: Source, offer: Expected) -> Reading[None]:
        """Read a whole answer."""


class CallFormat(Protocol):
    """A way in which models write calls of tools."""

    @property
    def markers(self) -> Sequence[str]:
        """All markers, any of which may be a special token: a tokenizer leaves those out unless it is told not to."""

    @property
    def begins(self) -> Sequence[str]:
        """The markers with which calls begin."""

    @property
    def bare(self) -> str:
        """The characters with which a call begins where an answer does, without a marker; empty for none."""

    def read(self, source: Source, tools: ToolTable, marker: str) -> Reading[None]:
        """Read what comes behind a marker, and make calls of it; the marker belongs to the attempt.

        Behind a call, an attempt ends: what is no call then is the text behind it. Raises `NoCall` for text that is no
        call.
        """


def read_answer(source: Source, offer: Expected, thought: Thought | None, calls: CallFormat | None) -> Reading[None]:
    """Read a whole answer."""
    calls = calls if offer.tools else None
    begins = () if calls is None else tuple(calls.begins)
    thoughts = () if thought is None else thought.begins
    if thought is not None and offer.thinking:
        # A model may write the marker again that its prompt ends with.
        yield from source.skip(NEWLINE)
        yield from source.accept(*thoughts)
        source.forget()
        yield from _read_thought(source, thought, offer.tools, calls)
    opens, begun = True, False  # whether a thought may begin here; the answer itself, where a call has no marker
    while True:
        if thought is not None and opens and (yield from _opens_thought(source, thoughts)):
            yield from _read_thought(source, thought, offer.tools, calls)
            continue
        opens = False
        if calls is not None and calls.bare and not begun:
            opens = yield from _read_bare(source, offer.tools, calls)
        begun = True
        if opens:
            continue
        marker = yield from source.pass_until(TextPiece, *begins, trimmed=NEWLINE if begins else "")
        if marker is None or calls is None:
            return
        source.begin(marker)
        opens = yield from _attempt(source, offer.tools, calls, marker)


def _opens_thought(source: Source, begins: tuple[str, ...]) -> Reading[bool]:
    """Take the marker of a thought and white space before it, if the text goes on with them; return whether it does."""
    yield from source.run(SPACE)
    if (yield from source.accept(*begins)) is None:
        source.put_back()
        return False
    source.forget()
    return True


def _read_thought(source: Source, thought: Thought, tools: ToolTable, calls: CallFormat | None) -> Reading[None]:
    source.thought_end = thought.end
    yield from _read_open_thought(source, thought, tools, calls)
    source.thought_end = None


def _read_open_thought(source: Source, thought: Thought, tools: ToolTable, calls: CallFormat | None) -> Reading[None]:
    yield from source.skip(NEWLINE)
    ends = *thought.ends, *(() if calls is None else thought.ended_by)
    while (marker := (yield from source.pass_until(ReasoningPiece, *ends, trimmed=NEWLINE))) is not None:
        if calls is None or marker in thought.ends:
            # The line breaks behind it may be the last text for a while.
            source.thought_end = None
            yield from source.skip(NEWLINE)
            return
        source.begin(marker)
        if (yield from _attempt(source, tools, calls, marker, ReasoningPiece)):
            return


def _read_bare(source: Source, tools: ToolTable, calls: CallFormat) -> Reading[bool]:
    """Read a call without a marker, if the text goes on with one; return whether there was one."""
    yield from source.run(SPACE)
    if (first := (yield from source.peek())) and first in calls.bare:
        # An answer may begin so without being a call: it is one from the name of a tool on.
        source.claimed = False
        return (yield from _attempt(source, tools, calls, ""))
    source.put_back()
    return False


def _attempt(
    source: Source,
    tools: ToolTable,
    calls: CallFormat,
    marker: str,
    make: type[TextPiece | ReasoningPiece] = TextPiece,
) -> Reading[bool]:
    """Read calls behind a marker, or make a piece of what is none; return whether there was one."""
    before = source.calls
    try:
        yield from calls.read(source, tools, marker)
    except NoCall:
        source.fail(make if source.calls == before else TextPiece)
    else:
        source.forget()
    return source.calls > before


@define(eq=False)
class ParserStage:
    """The stage whose pieces a parser makes."""

    source: Source
    reading: Reading[None]
    _done: bool = field(default=False)

    def __attrs_post_init__(self) -> None:
        self._run()

    @property
    def held(self) -> int:
        """The number of characters held back."""
        return self.source.held

    @property
    def watched(self) -> frozenset[str] | None:
        """The first characters of markers, while the text is the answer itself."""
        return self.source.watched

    @property
    def thought_end(self) -> str | None:
        """The text that would end the reasoning."""
        return self.source.thought_end

    def feed(self, text: str) -> Sequence[Piece]:
        """Take the next text; return the pieces that are certain now."""
        self.source.add(text)
        self._run()
        return self.source.take_pieces()

    def end(self, *, cut: bool = False) -> Sequence[Piece]:
        """Return the pieces that were held back; of a text that was `cut`, without the beginning of a call."""
        self.source.ended, self.source.cut = True, cut
        self._run()
        assert self._done
        return self.source.take_pieces()

    def _run(self) -> None:
        if not self._done:
            self._done = next(self.reading, self) is self
