"""The format `marked` of the recipe's test: calls as `[call NAME]{...}[/call]`."""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.json_text import json_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable


@frozen
class Marked:
    """A name in a marker, and a JSON object behind it."""

    markers: tuple[str, ...] = ("[call ", "[/call]")
    begins: tuple[str, ...] = ("[call ",)
    bare: str = ""

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read one call."""
        name, end = yield from source.until("]")
        if end is None or name not in tools:
            raise NoCall
        arguments = yield from json_value(source)
        yield from source.expect("[/call]")
        source.call(name, arguments)
