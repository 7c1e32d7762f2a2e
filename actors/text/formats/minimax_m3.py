"""Calls as MiniMax M3 writes them: elements named after arguments, and within them those of objects and lists.

Each tag stands behind a marker that is one token. The items of a list are elements `item`.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.arguments import encoded, member_of, types_of_schema, value_of
from actors.text.formats.json_text import LEVELS_MAX, SPACE
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX, raw_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import Schema, ToolTable

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
OPEN, CLOSE = f"{MARK}<", f"{MARK}</"
ITEM = "item"


@frozen
class MinimaxM3:
    """The calls between two markers, with their arguments as elements."""

    begins: tuple[str, ...] = (BEGIN,)
    bare: str = ""
    markers: tuple[str, ...] = (MARK, BEGIN, END)

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read the calls of a section."""
        yield from source.run(SPACE)
        yield from source.expect(INVOKE)
        while True:
            tool = yield from source.expect(*tools.schemas)
            yield from source.expect('">')
            root = tools.schemas[tool]
            members = yield from _members(source, INVOKE_END, root, root, LEVELS_MAX)
            source.call(tool, encoded(dict(members)))
            yield from source.run(SPACE)
            try:
                mark = yield from source.expect(INVOKE, END)
            except NoCall:
                # Calls are whole without the end of their section.
                source.fail()
                return
            if mark == END:
                return


def _members(source: Source, end: str, schema: Schema, root: Schema, levels: int) -> Reading[list[tuple[str, object]]]:
    """Take elements up to an end tag, and return their names and values."""
    members = list[tuple[str, object]]()
    yield from source.run(SPACE)
    while (yield from source.expect(OPEN, CLOSE)) == OPEN:
        name = yield from source.run_without("<>/\n", NAME_CHARACTERS_MAX)
        yield from source.expect(">")
        value = yield from _value(source, name, member_of(schema, root, name), root, levels)
        members.append((name, value))
        yield from source.run(SPACE)
    yield from source.expect(end.removeprefix(CLOSE))
    return members


def _value(source: Source, name: str, schema: Schema, root: Schema, levels: int) -> Reading[object]:
    """Take the value of an element and its end tag: text, or the elements of an object or a list."""
    end, types = f"{MARK}</{name}>", types_of_schema(schema, root)
    if types & {"object", "array"}:
        yield from source.run(SPACE)
    if (yield from source.starts_with(OPEN, CLOSE)) == OPEN:
        if not levels:
            raise NoCall
        members = yield from _members(source, end, schema, root, levels - 1)
        if "object" not in types and all(each == ITEM for each, _ in members):
            return [value for _, value in members]
        return dict(members)

    def follow(_: str, __: str) -> Reading[None]:
        """Read up to the next tag."""
        yield from source.run(SPACE)
        if (yield from source.starts_with(OPEN)) is None:
            raise NoCall

    text, _ = yield from raw_value(source, (end,), follow, json=False)
    if not text.strip() and types & {"object", "array"} and "string" not in types:
        return [] if "array" in types else {}
    return value_of(text, types)
