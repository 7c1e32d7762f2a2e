"""Calls as GLM 4.5 and later write them: a name, then pairs of `<arg_key>` and `<arg_value>`, within `<tool_call>`.

A string stands in its value as it is, another value as JSON. GLM 4.5 and 4.6 write line breaks between markers.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.arguments import encoded, is_json, types_of, value_of
from actors.text.formats.call_tags import TagPart, either, regex, sequence, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_text import SPACE
from actors.text.formats.parameter_tags import HeldParameter, parameters_in_order
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX, at_end, raw_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable
from protocol.schemas.parameters import NAMES_IN_TAGS

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
BREAK = regex("\n?")


@frozen
class Glm:
    """A name and pairs of keys and values between two markers."""

    begins: tuple[str, ...] = (BEGIN,)
    bare: str = ""
    frame: CallFrame = CallFrame(BEGIN, separator="\n", names=NAMES_IN_TAGS, plain_without="<")
    markers: tuple[str, ...] = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        return tag(f"{BEGIN}{name}", sequence(BREAK, parameters_in_order(arguments.kinds, self._pair)), END)

    def _pair(self, parameter: HeldParameter) -> TagPart:
        values = (tag(VALUE, value.part, VALUE_END) for value in parameter.values(self.markers))
        return sequence(KEY, parameter.name, KEY_END, BREAK, either(*values), BREAK)

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read one call."""
        yield from source.run(SPACE)
        tool = yield from source.expect(*tools.schemas)
        arguments = dict[str, object]()

        def follow(end: str, _: str) -> Reading[str | None]:
            """Read up to the next value, and return its key; None at the end of the call."""
            if end == END:
                yield from _close(source, tools)
                return None
            if end == VALUE_END:
                yield from source.run(SPACE)
                if (yield from source.expect(KEY, END)) == END:
                    return None
            key = yield from _key(source)
            # A value without its end marker, which would rather be a part of the value if its key makes no sense here.
            if end == KEY and (key in arguments or not tools.property(tool, key)):
                raise NoCall
            return key

        yield from source.run(SPACE)
        key = (yield from _key(source)) if (yield from source.expect(KEY, END)) == KEY else None
        while key is not None:
            arguments[key] = ""
            types = types_of(tools, tool, key)
            text, following = yield from raw_value(source, (VALUE_END, END, KEY), follow, json=is_json(types))
            arguments[key], key = value_of(text, types), following
        source.call(tool, encoded(arguments))


def _key(source: Source) -> Reading[str]:
    """Read a key and the beginning of its value."""
    key = yield from source.run_without("<", NAME_CHARACTERS_MAX)
    yield from source.expect(KEY_END)
    yield from source.run(SPACE)
    yield from source.expect(VALUE)
    return key


def _close(source: Source, tools: ToolTable) -> Reading[None]:
    """Read the end of a call whose last value has no end: nothing comes behind it, or the next call."""
    yield from source.run(SPACE)
    if not (yield from at_end(source)):
        following = yield from source.starts_with(*(BEGIN + tool for tool in tools.schemas))
        if following is None:
            raise NoCall
