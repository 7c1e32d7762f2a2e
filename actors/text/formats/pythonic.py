"""Calls as Llama 4 writes them: a Python list of calls, `[f(a=1), g()]`, as a whole answer or between two markers.

An engine is held to values in JSON, which are literals here, too. `True`, `False` and `None` may stand for the words of
JSON where one of them is a whole argument.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.call_tags import TagPart, either, sequence, tag, text
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import tool_name
from actors.text.formats.json_text import SPACE
from actors.text.formats.parameter_tags import HeldParameter, parameters_in_order
from actors.text.formats.python_literal import AS_PYTHON, NAME_END, json_object_of, python_literal
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable
from protocol.schemas.parameters import ParameterNames

BEGIN, END = "<|python_start|>", "<|python_end|>"
SEPARATOR = ", "
KEYWORDS = ParameterNames(
    NAME_END,
    f"an empty name, one of more than {NAME_CHARACTERS_MAX} characters, and one with white space or any of "
    f"{NAME_END.strip()} cannot be written",
    empty=False,
)


@frozen
class Pythonic:
    """A list of calls with arguments by name, all of which are literals."""

    begins: tuple[str, ...] = (BEGIN,)
    bare: str = "["
    markers: tuple[str, ...] = (BEGIN, END)
    frame: CallFrame = CallFrame(BEGIN, "[", SEPARATOR, "]", names=KEYWORDS, close=END)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        return tag(f"{name}(", parameters_in_order(arguments.kinds, self._argument, SEPARATOR), ")")

    @staticmethod
    def _argument(parameter: HeldParameter) -> TagPart:
        words = (text(AS_PYTHON[word]) for word in parameter.parameter.words)
        return sequence(parameter.name, "=", either(*(value.part for value in parameter.values(())), *words))

    def read(self, source: Source, tools: ToolTable, marker: str) -> Reading[None]:
        """Read a list of calls; none of them is certain before the list ends."""
        yield from source.run(SPACE)
        yield from source.expect("[")
        calls = list[tuple[str, str]]()
        mark = ","
        while mark == ",":
            yield from source.run(SPACE)
            # A comma may stand behind the last call, too.
            if calls and (yield from source.accept("]")):
                break
            calls.append((yield from _call(source, tools)))
            yield from source.run(SPACE)
            mark = yield from source.expect(",", "]")
        for tool, arguments in calls:
            source.call(tool, arguments)
        if marker == BEGIN:
            yield from source.close(SPACE, END)


def _call(source: Source, tools: ToolTable) -> Reading[tuple[str, str]]:
    """Read one call, and return its tool and the JSON text of its arguments."""
    tool = yield from tool_name(source, tools)
    yield from source.run(SPACE)
    yield from source.expect("(")
    arguments = dict[str, str]()
    yield from source.run(SPACE)
    while (yield from source.accept(")")) is None:
        key = yield from source.run_without(NAME_END, NAME_CHARACTERS_MAX)
        if not key:
            raise NoCall
        yield from source.run(SPACE)
        yield from source.expect("=")
        arguments[key] = yield from python_literal(source)
        yield from source.run(SPACE)
        if (yield from source.accept(",")) is None:
            yield from source.expect(")")
            break
        yield from source.run(SPACE)
    return tool, json_object_of(arguments)
