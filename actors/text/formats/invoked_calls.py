"""Calls as elements `invoke` with elements `parameter`, several in one section: DeepSeek's DSML, and MiniMax M2.

In DSML a parameter has an attribute `string`, which is false for a value in JSON.
"""

from __future__ import annotations

import json

from attrs import frozen

from actors.text.formats.arguments import STRING, decoded, encoded, is_json, types_of, value_of
from actors.text.formats.call_tags import TagPart, either, sequence, tag
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_text import SPACE
from actors.text.formats.parameter_tags import HeldParameter, HeldValue, parameters_in_order
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX, at_end, raw_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable
from protocol.schemas.parameters import NAMES_IN_TAGS

DSML = "\uff5cDSML\uff5c"  # one token; the bars are full-width


@frozen
class ParameterHeader:
    """The beginning of a parameter: its name, and whether it is a string, None if it has no such attribute."""

    name: str
    string: bool | None


@frozen
class InvokedCalls:
    """The calls between two markers of a section; `open` and `close` stand before the names of elements in it."""

    begin: str
    end: str
    open: str
    close: str
    tokens: tuple[str, ...] = ()  # parts of its markers that are tokens of their own
    typed: bool = False  # a parameter has the attribute `string`
    bare: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        """The marker of a section."""
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        elements = (f"{mark}{name}" for name in ("invoke", "parameter") for mark in (self.open, self.close))
        return (self.begin, self.end, *elements, *self.tokens)

    @property
    def frame(self) -> CallFrame:
        """The text around calls."""
        begin, end = f"{self.begin}\n", f"\n{self.end}"
        return CallFrame(self.begin, begin, "\n", end, names=NAMES_IN_TAGS, plain_without="<", typed=self.typed)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        parameters = parameters_in_order(arguments.kinds, self._parameter)
        return tag(f'{self.open}invoke name="{name}">\n', parameters, f"{self.close}invoke>")

    def _parameter(self, parameter: HeldParameter) -> TagPart:
        def written(value: HeldValue) -> TagPart:
            string = f' string="{json.dumps(value.string)}"' if self.typed else ""
            return tag(f'"{string}>', value.part, f"{self.close}parameter>\n")

        values = map(written, parameter.values(self.markers))
        return sequence(f'{self.open}parameter name="', parameter.name, either(*values))

    def read(self, source: Source, tools: ToolTable, _: str) -> Reading[None]:
        """Read the calls of a section."""
        invoke = f'{self.open}invoke name="'
        yield from source.run(SPACE)
        yield from source.expect(invoke)
        while True:
            tool = yield from source.expect(*tools.schemas)
            yield from source.expect('"')
            yield from source.run(SPACE)
            arguments = dict[str, object]()
            if (yield from source.expect(">", "/>")) == ">":
                yield from self._read_parameters(source, tools, tool, arguments)
            source.call(tool, encoded(arguments))
            yield from source.run(SPACE)
            try:
                mark = yield from source.expect(invoke, self.end)
            except NoCall:
                # Calls are whole without the end of their section.
                source.fail()
                return
            if mark == self.end:
                return

    def _read_parameters(
        self, source: Source, tools: ToolTable, tool: str, arguments: dict[str, object]
    ) -> Reading[None]:
        """Read the parameters of a call and its end."""
        parameter, parameter_end = f'{self.open}parameter name="', f"{self.close}parameter>"
        invoke_end = f"{self.close}invoke>"
        followers = f'{self.open}invoke name="', self.end

        def follow(_: str, __: str) -> Reading[ParameterHeader | None]:
            """Read up to the next value, and return its header; None at the end of the call."""
            yield from source.run(SPACE)
            if (yield from source.expect(parameter, invoke_end)) == parameter:
                return (yield from _header(source))
            yield from source.run(SPACE)
            if (yield from source.starts_with(*followers)) is None and not (yield from at_end(source)):
                raise NoCall
            return None

        yield from source.run(SPACE)
        if (yield from source.expect(parameter, invoke_end)) == invoke_end:
            return
        header: ParameterHeader | None = yield from _header(source)
        while header is not None:
            types = types_of(tools, tool, header.name)
            if header.string and (not types or "string" in types):
                types = STRING
            as_json = header.string is False or is_json(types)
            text, following = yield from raw_value(source, (parameter_end,), follow, json=as_json)
            arguments[header.name] = _value(text, types, header)
            header = following


def _header(source: Source) -> Reading[ParameterHeader]:
    """Read the rest of the beginning of a parameter behind the quotation mark of its name."""
    name = yield from source.run_without('"<>\n', NAME_CHARACTERS_MAX)
    yield from source.expect('"')
    yield from source.run(SPACE)
    if (yield from source.expect('string="', ">")) == ">":
        return ParameterHeader(name, None)
    string = yield from source.expect("true", "false")
    yield from source.expect('"')
    yield from source.run(SPACE)
    yield from source.expect(">")
    return ParameterHeader(name, string == "true")


def _value(text: str, types: frozenset[str], header: ParameterHeader) -> object:
    """Return the value of a parameter: what its header claims, else by the schema."""
    if header.string is False:
        try:
            return decoded(text)
        except ValueError:
            pass
    return value_of(text, types)


def dsml(section: str, space: str = "") -> InvokedCalls:
    """Return the format of DeepSeek's DSML whose sections and elements have these names."""
    open_, close = f"<{DSML}{space}", f"</{DSML}{space}"
    return InvokedCalls(f"{open_}{section}>", f"{close}{section}>", open_, close, (DSML,), typed=True)


MINIMAX_M2 = InvokedCalls("<minimax:tool_call>", "</minimax:tool_call>", "<", "</")
