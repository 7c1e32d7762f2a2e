"""The calls of a format as a grammar: parts of a structural tag (xgrammar 0.2.7), which are plain JSON.

A format that can be held to calls has, beside its parser, the parts of one call (`HeldFormat`). Its parser reads
whatever these parts allow, so both stand in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from attrs import frozen

from actors.text.formats.tool_table import Schema

TagPart: TypeAlias = dict[str, object]
"""A grammar as JSON: a part of a structural tag."""

WHITESPACE_MAX = 2
"""The most characters of white space in one place of the arguments: without a bound a model may write it for ever."""


@frozen
class HeldArguments:
    """The arguments of a tool as an engine is held to them."""

    schema: Schema  # an engine's schema, see `protocol.schemas`

    @property
    def json(self) -> TagPart:
        """The grammar of a JSON object."""
        return {"type": "json_schema", "json_schema": self.schema, "max_whitespace_cnt": WHITESPACE_MAX}


@frozen
class CallFrame:
    """The text around the calls of an answer: before the first, between two, and behind the last.

    A text that goes on with `trigger` has come to a call: `begin`, or else each call, begins with it.
    """

    trigger: str
    begin: str = ""
    separator: str = ""
    end: str = ""


@runtime_checkable
class HeldFormat(Protocol):
    """A format whose calls a grammar can demand."""

    @property
    def frame(self) -> CallFrame:
        """The text around calls."""

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call, made by `tag`."""


def text(value: str) -> TagPart:
    """Return the grammar of one text."""
    return {"type": "const_string", "value": value}


def sequence(*parts: str | TagPart) -> TagPart:
    """Return the grammar of parts one after the other; empty texts are left out."""
    elements = [text(part) if isinstance(part, str) else part for part in parts if part]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def optional(part: TagPart) -> TagPart:
    """Return the grammar of something that may be missing."""
    return {"type": "optional", "content": part}


def tag(begin: str, content: TagPart, end: str) -> TagPart:
    """Return the grammar of something between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text_until(end: str, begin: str = "") -> TagPart:
    """Return the grammar of any text between two markers, both included."""
    return tag(begin, {"type": "any_text"}, end)


def separated(tags: Sequence[TagPart], separator: str, *, several: bool) -> TagPart:
    """Return the grammar of one of these tags, or of `several`."""
    listed = {"type": "tags_with_separator", "tags": list(tags), "separator": separator}
    return {**listed, "at_least_one": True, "stop_after_first": not several}


def triggered(trigger: str, tags: Sequence[TagPart], *, several: bool) -> TagPart:
    """Return the grammar of a text in which `trigger` begins one of these tags, and ends the text unless `several`."""
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), "stop_after_first": not several}
