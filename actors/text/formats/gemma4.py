"""Calls as Gemma 4 writes them: a name and an object in a notation of its own, between two markers.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],options:{dry run:true}}<tool_call|>

Keys have no quotes, and may contain blanks. A string stands as it is between two `<|"|>`, which alone can end it.
Numbers and words are those of JSON, and the arguments become JSON. Reasoning stands between
`<|channel>thought` and `<channel|>`.
"""

from __future__ import annotations

import json

from attrs import frozen

from actors.text.formats.call_tags import TagPart, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import tool_name
from actors.text.formats.json_text import ENDS, LEVELS_MAX, SPACE, json_scalar
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable

BEGIN, PREFIX, END = "<|tool_call>", "call:", "<tool_call|>"
QUOTE = '<|"|>'
KEY_CHARACTERS_MAX = 256


@frozen
class Gemma4:
    """A name and an object between two markers."""

    markers: tuple[str, ...] = (BEGIN, END, QUOTE)
    begins: tuple[str, ...] = (BEGIN,)
    bare: str = ""
    frame: CallFrame = CallFrame(BEGIN)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call, whose arguments are JSON: the notation has that as a part."""
        return tag(f"{BEGIN}{PREFIX}{name}", arguments.json, END)

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read one call."""
        yield from source.run(SPACE)
        yield from source.expect(PREFIX)
        name = yield from tool_name(source, tools)
        yield from source.run(SPACE)
        if (yield from source.peek()) != "{":
            raise NoCall
        source.call(name, (yield from _value(source)))
        # The object is the call: what closes it may be missing.
        yield from source.close(SPACE, END)


def _value(source: Source) -> Reading[str]:
    """Take an object or a list and return it as JSON; raises `NoCall`."""
    parts = list[str]()
    ends = list[str]()  # of the objects and lists that are open
    while True:
        first = yield from source.peek()
        if first in ENDS:
            ends.append(ENDS[first])
            if len(ends) > LEVELS_MAX:
                raise NoCall
            parts.append(source.take(1))
            yield from source.run(SPACE)
            if (yield from source.starts_with(ends[-1])) is None:
                yield from _key(source, parts, ends[-1])
                continue
        else:
            yield from _scalar(source, parts)
            yield from source.run(SPACE)
        # A value is complete, and with it those around it that end here.
        while ends and (mark := (yield from source.expect(",", ends[-1]))) != ",":
            parts.append(mark)
            ends.pop()
            if ends:
                yield from source.run(SPACE)
        if not ends:
            return "".join(parts)
        parts.append(", ")
        yield from source.run(SPACE)
        yield from _key(source, parts, ends[-1])


def _scalar(source: Source, parts: list[str]) -> Reading[None]:
    """Take a value without values in it."""
    if (yield from source.accept(QUOTE)) is not None:
        parts.append((yield from _string(source)))
    else:
        parts.append((yield from json_scalar(source)))


def _string(source: Source) -> Reading[str]:
    """Take a string behind its first quote, and return it as JSON."""
    text, end = yield from source.until(QUOTE)
    if end is None:
        raise NoCall
    return json.dumps(text, ensure_ascii=False)


def _key(source: Source, parts: list[str], end: str) -> Reading[None]:
    """Take the key of a member of an object; nothing in a list."""
    if end != "}":
        return
    if (yield from source.accept(QUOTE)) is not None:
        key = yield from _string(source)
    elif (yield from source.peek()) == '"':
        key = yield from json_scalar(source)
    else:
        key = yield from _bare_key(source)
    yield from source.run(SPACE)
    yield from source.expect(":")
    yield from source.run(SPACE)
    parts.append(f"{key}: ")


def _bare_key(source: Source) -> Reading[str]:
    key = (yield from source.run_without(':,{}[]<"\n', KEY_CHARACTERS_MAX)).rstrip()
    if not key:
        raise NoCall
    return json.dumps(key, ensure_ascii=False)
