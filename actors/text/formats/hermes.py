"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json

from attrs import frozen

from actors.text.formats.call_tags import TagPart, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import call_object
from actors.text.formats.json_text import SPACE
from actors.text.formats.source import Reading, Source
from actors.text.formats.tool_table import ToolTable

BEGIN, END = "<tool_call>", "</tool_call>"


@frozen
class Hermes:
    """One JSON object between two markers."""

    markers: tuple[str, ...] = (BEGIN, END)
    begins: tuple[str, ...] = (BEGIN,)
    bare: str = ""
    frame: CallFrame = CallFrame(BEGIN, separator="\n")

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read one call."""
        name, arguments = yield from call_object(source, tools)
        source.call(name, arguments)
        # The object is the call: a model that ends its answer, or begins the next call, leaves the marker out.
        yield from source.close(SPACE, END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        return tag(f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', arguments.json, f"}}\n{END}")
