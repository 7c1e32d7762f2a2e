"""Calls as Qwen3-Coder and Qwen 3.5 write them: `<function=NAME>` and `<parameter=NAME>`, within `<tool_call>`.

The templates write a line break behind the beginning of a value and another one before its end. Models leave out the
first marker, and now and then the end of a parameter.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.arguments import encoded, is_json, types_of, value_of
from actors.text.formats.call_tags import TagPart, either, sequence, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_text import SPACE
from actors.text.formats.parameter_tags import HeldParameter, parameters_in_order
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX, at_end, raw_value
from actors.text.formats.source import NEWLINE, NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable
from protocol.schemas.parameters import NAMES_IN_TAGS

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


@frozen
class QwenCoder:
    """A function with its parameters, all by name, between two markers."""

    begins: tuple[str, ...] = (BEGIN, FUNCTION)
    bare: str = ""
    frame: CallFrame = CallFrame(BEGIN, separator="\n", names=NAMES_IN_TAGS, plain_without="<")
    markers: tuple[str, ...] = (BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        begin, end = f"{BEGIN}\n{FUNCTION}{name}>\n", f"{FUNCTION_END}\n{END}"
        return tag(begin, parameters_in_order(arguments.kinds, self._parameter), end)

    def _parameter(self, parameter: HeldParameter) -> TagPart:
        values = (tag(">\n", value.part, f"\n{PARAMETER_END}\n") for value in parameter.values(self.markers))
        return sequence(PARAMETER, parameter.name, either(*values))

    def read(self, source: Source, tools: ToolTable, marker: str) -> Reading[None]:
        """Read one call."""
        if marker == BEGIN:
            yield from source.run(SPACE)
            yield from source.expect(FUNCTION)
        tool = yield from source.expect(*tools.schemas)
        yield from source.expect(">")
        arguments = dict[str, object]()

        def follow(end: str, before: str) -> Reading[str | None]:
            """Read up to the next value, and return the parameter's name; None at the end of the call."""
            if end == PARAMETER_END:
                yield from source.run(SPACE)
                mark = yield from source.expect(PARAMETER, FUNCTION_END)
            else:
                mark = end
            if mark == FUNCTION_END:
                yield from _close(source)
                return None
            name = yield from _name(source)
            # A value without its end marker: this is a part of the value if it makes no sense as the next parameter.
            if end == PARAMETER and (
                before not in {"", NEWLINE} or name in arguments or not tools.property(tool, name)
            ):
                raise NoCall
            return name

        yield from source.run(SPACE)
        mark = yield from source.expect(PARAMETER, FUNCTION_END)
        if mark == FUNCTION_END:
            source.call(tool, "{}")
            yield from source.close(SPACE, END)
            return
        name: str | None = yield from _name(source)
        while name is not None:
            arguments[name] = ""
            types = types_of(tools, tool, name)
            text, following = yield from raw_value(
                source, (PARAMETER_END, FUNCTION_END, PARAMETER), follow, json=is_json(types)
            )
            text = text.removeprefix(NEWLINE).removesuffix(NEWLINE)
            arguments[name], name = value_of(text, types), following
        source.call(tool, encoded(arguments))


def _name(source: Source) -> Reading[str]:
    """Read the name of a parameter."""
    name = yield from source.run_without("<>\n", NAME_CHARACTERS_MAX)
    yield from source.expect(">")
    return name


def _close(source: Source) -> Reading[None]:
    """Read the end of a call behind that of its function: the marker that a value might have too is not enough."""
    yield from source.run(SPACE)
    if (yield from source.accept(END)) is None and not (yield from at_end(source)):
        following = yield from source.starts_with(BEGIN, FUNCTION)
        if following is None:
            raise NoCall
