"""Calls as MiniMax M3 writes them: elements named after arguments, and within them those of objects and lists.

Each tag stands behind a marker that is one token. The items of a list are elements `item`.

An engine is held to an element for each argument, with a plain string or JSON in it. No grammar can repeat a name that
is not known before, so arguments of any names are one JSON object.
"""

from __future__ import annotations

from typing import cast

from attrs import frozen

from actors.text.formats.arguments import decoded, encoded, member_of, types_of_schema, value_of
from actors.text.formats.call_tags import TagPart, either, optional, repeated, sequence, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import json_object
from actors.text.formats.json_text import LEVELS_MAX, SPACE
from actors.text.formats.parameter_tags import HeldParameter, parameters_in_order
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX, raw_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import Schema, ToolTable
from protocol.schemas.parameters import ParameterNames

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
OPEN, CLOSE = f"{MARK}<", f"{MARK}</"
ITEM = "item"
NO_NAME = "<>/\n"
KEYS = ParameterNames(
    NO_NAME,
    f"a name with <, >, / or a line break, or of more than {NAME_CHARACTERS_MAX} characters, cannot be written",
)


@frozen
class MinimaxM3:
    """The calls between two markers, with their arguments as elements."""

    begins: tuple[str, ...] = (BEGIN,)
    bare: str = ""
    frame: CallFrame = CallFrame(BEGIN, f"{BEGIN}\n", "\n", f"\n{END}", names=KEYS, plain_without="<")
    markers: tuple[str, ...] = (MARK, BEGIN, END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        named = [kind for kind in arguments.kinds if all(each.parameter.name is not None for each in kind)]
        options = [parameters_in_order(named, self._element)] if named else []
        if arguments.listed:
            options.append(repeated(either(*map(self._element, arguments.listed)), 0, None))
        if any_names := [each.parameter for kind in arguments.kinds for each in kind if each.parameter.name is None]:
            least = min(each.least for each in any_names)
            options.append(arguments.json if least else optional(arguments.json))
        return tag(f'{INVOKE}{name}">', either(*options), INVOKE_END)

    def _element(self, parameter: HeldParameter) -> TagPart:
        end = f"{MARK}</{parameter.parameter.name}>"
        values = (tag(">", value.part, end) for value in parameter.values(self.markers))
        return sequence(OPEN, parameter.name, either(*values))

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read the calls of a section."""
        yield from source.run(SPACE)
        yield from source.expect(INVOKE)
        while True:
            tool = yield from source.expect(*tools.schemas)
            yield from source.expect('">')
            root = tools.schemas[tool]
            yield from source.run(SPACE)
            if (yield from source.peek()) == "{":
                arguments = yield from _object(source)
            else:
                arguments = dict((yield from _members(source, INVOKE_END, root, root, LEVELS_MAX)))
            source.call(tool, encoded(arguments))
            yield from source.run(SPACE)
            try:
                mark = yield from source.expect(INVOKE, END)
            except NoCall:
                # Calls are whole without the end of their section.
                source.fail()
                return
            if mark == END:
                return


def _object(source: Source) -> Reading[dict[str, object]]:
    """Take the arguments of a call that are one JSON object, and its end."""
    text = yield from json_object(source)
    yield from source.run(SPACE)
    yield from source.expect(INVOKE_END)
    try:
        return cast("dict[str, object]", decoded(text))
    except ValueError:
        raise NoCall from None


def _members(source: Source, end: str, schema: Schema, root: Schema, levels: int) -> Reading[list[tuple[str, object]]]:
    """Take elements up to an end tag, and return their names and values."""
    members = list[tuple[str, object]]()
    yield from source.run(SPACE)
    while (yield from source.expect(OPEN, CLOSE)) == OPEN:
        name = yield from source.run_without(NO_NAME, NAME_CHARACTERS_MAX)
        yield from source.expect(">")
        value = yield from _value(source, name, member_of(schema, root, name), root, levels)
        members.append((name, value))
        yield from source.run(SPACE)
    yield from source.expect(end.removeprefix(CLOSE))
    return members


def _value(source: Source, name: str, schema: Schema, root: Schema, levels: int) -> Reading[object]:
    """Take the value of an element and its end tag: text, or the elements of an object or a list."""
    end, types = f"{MARK}</{name}>", types_of_schema(schema, root)
    space = (yield from source.run(SPACE)) if types & {"object", "array"} else ""
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

    text, _ = yield from raw_value(source, (end,), follow, json="string" not in types)
    text = f"{space}{text}"
    if not text.strip() and types & {"object", "array"} and "string" not in types:
        return [] if "array" in types else {}
    return value_of(text, types)
