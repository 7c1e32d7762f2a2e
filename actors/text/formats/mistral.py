"""Calls as Mistral models write them, behind `[TOOL_CALLS]`: a JSON list, or for each call a name and a JSON object.

Tokenizers of version 3 (Mistral 7B v0.3, Nemo, Large 2407): `[TOOL_CALLS] [{"name": "f", "arguments": {}}, ...]`.
Later ones (11 and 13: Mistral Small 3.2, Magistral, Devstral, Ministral): `[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}`,
where `[CALL_ID]` and an id may follow the name, and models leave `[ARGS]` out. A list has no marker in common with a
name, so one format reads both.
"""

from __future__ import annotations

import string

from attrs import frozen

from actors.text.formats.call_tags import TagPart, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import call_object, json_object, tool_name
from actors.text.formats.json_text import SPACE
from actors.text.formats.source import Reading, Source
from actors.text.formats.tool_table import ToolTable

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARACTERS, ID_SIZE_MAX = string.ascii_letters + string.digits + "_-", 64


@frozen
class Mistral:
    """A list of JSON objects, or a name and a JSON object."""

    markers: tuple[str, ...] = (CALLS, CALL_ID, ARGUMENTS)
    begins: tuple[str, ...] = (CALLS,)
    bare: str = ""
    frame: CallFrame = CallFrame(CALLS)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call, as later models write it."""
        return tag(f"{CALLS}{name}{ARGUMENTS}", arguments.json, "")

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read a list of calls, or one call."""
        yield from source.run(SPACE)
        if (yield from source.accept("[")) is not None:
            yield from self._list(source, tools)
            return
        name = yield from tool_name(source, tools)
        if (yield from source.accept(CALL_ID)) is not None:
            yield from source.run(ID_CHARACTERS, ID_SIZE_MAX)
        yield from source.accept(ARGUMENTS)
        source.call(name, (yield from json_object(source)))

    @staticmethod
    def _list(source: Source, tools: ToolTable) -> Reading[None]:
        """Read the calls of a list, each of which is a call as soon as it is whole."""
        mark: str | None = ","
        while mark == ",":
            name, arguments = yield from call_object(source, tools)
            source.call(name, arguments)
            mark = yield from source.close(SPACE, ",", "]")
