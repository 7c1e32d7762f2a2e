"""Calls as Kimi K2 models write them: a section of calls, each with an id that has the name, and a JSON object.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

(without the line break). The number counts the calls of a conversation. Models leave out `functions.`, and write blanks
between the parts. What stands in a section before its first call is no answer, and is left out; a section with text
alone is no section.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.call_tags import TagPart, regex, sequence, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import json_object, tool_name
from actors.text.formats.json_text import SPACE
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."
DIGITS = "0123456789"
NUMBER = regex("[0-9]{1,4}")  # without a bound a model may count for ever


@frozen
class KimiK2:
    """Calls in a section; models leave its marker out, too."""

    markers: tuple[str, ...] = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
    begins: tuple[str, ...] = (SECTION, CALL)
    bare: str = ""
    frame: CallFrame = CallFrame(SECTION, SECTION, "", SECTION_END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        return tag(f"{CALL}{PREFIX}{name}:", sequence(NUMBER, ARGUMENTS, arguments.json), CALL_END)

    def read(self, source: Source, tools: ToolTable, marker: str) -> Reading[None]:
        """Read a section, or the calls behind the marker of the first one."""
        found: str | None = marker
        if marker == SECTION:
            before, found = yield from source.until(CALL, SECTION_END)
            if found is None or (found == SECTION_END and before.strip()):
                raise NoCall
        while found == CALL:
            yield from source.run(SPACE)
            name = yield from tool_name(source, tools, PREFIX)
            if (yield from source.accept(":")) is not None:
                yield from source.run(DIGITS)
            yield from source.run(SPACE)
            yield from source.expect(ARGUMENTS)
            source.call(name, (yield from json_object(source)))
            # The object is the call. What closes it may be missing, and none of it is text.
            yield from source.close(SPACE, CALL_END)
            if (found := (yield from source.close(SPACE, CALL, SECTION_END))) == CALL:
                source.begin(CALL)
