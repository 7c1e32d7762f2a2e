"""Calls as DeepSeek V3, R1 and V3.1 write them: a section of calls, each with a name and a JSON object.

V3 and R1 write the kind of a call, and its arguments as a block of Markdown:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes `<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>` in such a section.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.call_tags import TagPart, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import json_object, tool_name
from actors.text.formats.json_text import SPACE
from actors.text.formats.source import Reading, Source
from actors.text.formats.tool_table import ToolTable

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIND, FENCES, FENCE_END = "function", ("```json", "```"), "```"


@frozen
class DeepSeek:
    """Calls in a section; models leave its marker out, too."""

    fenced: bool
    markers: tuple[str, ...] = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)
    begins: tuple[str, ...] = (CALLS, CALL)
    bare: str = ""

    @property
    def frame(self) -> CallFrame:
        """The text around calls."""
        return CallFrame(CALLS, CALLS, "\n" if self.fenced else "", CALLS_END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        if self.fenced:
            return tag(f"{CALL}{KIND}{SEPARATOR}{name}\n```json\n", arguments.json, f"\n{FENCE_END}{CALL_END}")
        return tag(f"{CALL}{name}{SEPARATOR}", arguments.json, CALL_END)

    def read(self, source: Source, tools: ToolTable, marker: str) -> Reading[None]:
        """Read a section, or the calls behind the marker of the first one."""
        if marker == CALLS:
            yield from source.run(SPACE)
            yield from source.expect(CALL)
        found: str | None = CALL
        while found == CALL:
            name = yield from self._name(source, tools)
            if self.fenced:
                yield from source.run(SPACE)
                yield from source.accept(*FENCES)
            source.call(name, (yield from json_object(source)))
            # The object is the call. What closes it may be missing, and none of it is text.
            if self.fenced:
                yield from source.close(SPACE, FENCE_END)
            yield from source.close(SPACE, CALL_END)
            if (found := (yield from source.close(SPACE, CALL, CALLS_END))) == CALL:
                source.begin(CALL)

    def _name(self, source: Source, tools: ToolTable) -> Reading[str]:
        if self.fenced:
            yield from source.expect(KIND)
            yield from source.expect(SEPARATOR)
            return (yield from tool_name(source, tools))
        name = yield from tool_name(source, tools)
        yield from source.expect(SEPARATOR)
        return name
