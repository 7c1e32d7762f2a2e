"""Calls as Llama 3.1, 3.2 and 3.3 write them: an answer that is a JSON object, or one behind `<|python_tag|>`.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}

Models also write `arguments` for `parameters`. An answer may be JSON without being a call, so both keys of a call have
to be there.
"""

from __future__ import annotations

import json

from attrs import frozen

from actors.text.formats.call_tags import TagPart, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import call_object
from actors.text.formats.json_text import SPACE
from actors.text.formats.source import Reading, Source
from actors.text.formats.tool_table import ToolTable

PYTHON_TAG = "<|python_tag|>"
ARGUMENTS = ("parameters", "arguments")


@frozen
class Llama3:
    """JSON objects with semicolons between them."""

    markers: tuple[str, ...] = (PYTHON_TAG,)
    begins: tuple[str, ...] = (PYTHON_TAG,)
    bare: str = "{"
    frame: CallFrame = CallFrame(PYTHON_TAG, separator="; ")

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        return tag(f'{{"name": {json.dumps(name)}, "parameters": ', arguments.json, "}")

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read calls."""
        while True:
            name, arguments = yield from call_object(source, tools, arguments=ARGUMENTS, required=True)
            source.call(name, arguments)
            yield from source.run(SPACE)
            if (yield from source.accept(";")) is not None:
                yield from source.run(SPACE)
            if (yield from source.peek()) != "{":
                source.fail()
                return
