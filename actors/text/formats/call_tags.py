"""The parts of a structural tag (xgrammar 0.2.7), as plain JSON: grammars of the calls of formats are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

TagPart: TypeAlias = dict[str, object]
"""A grammar as JSON: a part of a structural tag."""

WHITESPACE_MAX = 2
"""The most characters of white space in one place of JSON: without a bound a model may write it for ever."""


def text(value: str) -> TagPart:
    """Return the grammar of one text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> TagPart:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    if not pattern:
        # The backend takes no empty expression.
        return text("")
    return {"type": "regex", "pattern": pattern}


def json_of(schema: object) -> TagPart:
    """Return the grammar of JSON under a schema, which is an engine's (see `protocol.schemas`)."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": WHITESPACE_MAX}


def sequence(*parts: str | TagPart) -> TagPart:
    """Return the grammar of parts one after the other; empty texts are left out."""
    elements = [text(part) if isinstance(part, str) else part for part in parts if part]
    if not elements:
        return text("")
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def either(*options: TagPart) -> TagPart:
    """Return the grammar of any one of these."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: TagPart) -> TagPart:
    """Return the grammar of something that may be missing."""
    return {"type": "optional", "content": part}


def repeated(part: TagPart, least: int, most: int | None) -> TagPart:
    """Return the grammar of so many of one part."""
    return {"type": "repeat", "min": least, "max": -1 if most is None else most, "content": part}


def tag(begin: str, content: TagPart, end: str) -> TagPart:
    """Return the grammar of something between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_text(excluded: Sequence[str] = ()) -> TagPart:
    """Return the grammar of any text without some texts."""
    return {"type": "any_text", "excludes": list(excluded)} if excluded else {"type": "any_text"}


def text_until(end: str, begin: str = "", excluded: Sequence[str] = ()) -> TagPart:
    """Return the grammar of any text between two markers, both included."""
    return tag(begin, any_text(excluded), end)


def separated(tags: Sequence[TagPart], separator: str, *, several: bool) -> TagPart:
    """Return the grammar of one of these tags, or of `several`."""
    listed = {"type": "tags_with_separator", "tags": list(tags), "separator": separator}
    return {**listed, "at_least_one": True, "stop_after_first": not several}


def triggered(trigger: str, tags: Sequence[TagPart], *, several: bool, excluded: Sequence[str] = ()) -> TagPart:
    """Return the grammar of a text in which `trigger` begins one of these tags, and ends the text unless `several`.

    The text between tags has none of the texts `excluded`.
    """
    listed = {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), "stop_after_first": not several}
    return {**listed, "excludes": list(excluded)} if excluded else listed
