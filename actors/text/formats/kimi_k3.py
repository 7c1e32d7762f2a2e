"""The answers of Kimi K3: reasoning, text and calls are elements, each between `<|open|>` and `<|close|>` tags.

A string stands in its argument as it is, another value as JSON; the tag of an argument has its type.
"""

from __future__ import annotations

from html import unescape

from attrs import frozen

from actors.text.formats.answer import Expected
from actors.text.formats.arguments import STRING, decoded, encoded, is_json, types_of, value_of
from actors.text.formats.call_tags import TagPart, either, optional, regex, sequence, tag, text, text_until
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_text import SPACE, json_value
from actors.text.formats.parameter_tags import HeldParameter, HeldValue, parameters_in_order
from actors.text.formats.raw_value import NAME_CHARACTERS_MAX, at_end, raw_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.stage import ReasoningPiece, TextPiece
from actors.text.formats.tool_table import ToolTable
from protocol.schemas.parameters import ParameterNames

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
THOUGHT, THOUGHT_END = f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}"
RESPONSE, RESPONSE_END = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
TOOLS, TOOLS_END = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
MESSAGE_END = f"{CLOSE}message{SEP}"
CALL, CALL_END = f'{OPEN}call tool="', f"{CLOSE}call{SEP}"
ARGUMENT, ARGUMENT_END = f'{OPEN}argument key="', f"{CLOSE}argument{SEP}"
OBJECT, OBJECT_END = f'{OPEN}json type="object"{SEP}', f"{CLOSE}json{SEP}"

INDEX = regex("[1-9][0-9]{0,2}")  # of a call; without a bound a model may write it for ever
KEYS = ParameterNames(
    "<", f"a name with <, or of more than {NAME_CHARACTERS_MAX} characters, cannot be written", escaped='&"'
)
KEY_CHARACTERS_MAX = len("&quot;") * NAME_CHARACTERS_MAX
NUMBERS = frozenset({"number", "integer"})


@frozen
class Argument:
    """The tag of an argument."""

    key: str
    kind: str


@frozen
class KimiK3:
    """Elements for reasoning, text and calls."""

    thought_begins: tuple[str, ...] = (THOUGHT,)
    thought_ends: tuple[str, ...] = (THOUGHT_END, RESPONSE)
    markers: tuple[str, ...] = (OPEN, CLOSE, SEP, "<|end_of_msg|>")

    @property
    def frame(self) -> CallFrame:
        """The text around calls, behind an empty element of text or what is left of one."""
        lead = sequence(optional(_thought()), optional(text(RESPONSE)), optional(text(RESPONSE_END)))
        return CallFrame(TOOLS, TOOLS, "", TOOLS_END, lead, names=KEYS, plain_without="<", typed=True)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call."""
        parameters = parameters_in_order(arguments.kinds, self._argument)
        return tag(f'{CALL}{_escaped(name)}" index="', sequence(INDEX, f'"{SEP}', parameters), CALL_END)

    def _argument(self, parameter: HeldParameter) -> TagPart:
        others = {"number" if kind == "integer" else kind for kind in parameter.parameter.types}

        def written(value: HeldValue) -> TagPart:
            # The parser reads a value that is no string whichever of these types stands before it.
            kind = "string" if value.string else regex("|".join(sorted(others)))
            return sequence(kind, tag(f'"{SEP}', value.part, ARGUMENT_END))

        values = map(written, parameter.values(self.markers))
        name = parameter.parameter.name
        key = parameter.name if name is None else _escaped(name)
        return sequence(ARGUMENT, key, '" type="', either(*values))

    @property
    def thought_rest(self) -> TagPart:
        """The grammar of the rest of a thought."""
        return text_until(THOUGHT_END, excluded=(RESPONSE, TOOLS))

    def answer(self, content: TagPart, *, begun: bool) -> TagPart:
        """Return the grammar of the element of an answer's text, whose markers may be missing, as for the parser."""
        end = optional(sequence(RESPONSE_END, optional(text(MESSAGE_END))))
        if begun:
            return sequence(content, end)
        return sequence(optional(_thought()), optional(text(RESPONSE)), content, end)

    def read_whole(self, source: Source, offer: Expected) -> Reading[None]:
        """Read a whole answer."""
        tools = (TOOLS,) if offer.tools else ()
        in_thought = offer.thinking
        while True:
            if in_thought:
                ends = (THOUGHT_END, RESPONSE, *tools)
                marker = yield from source.pass_until(ReasoningPiece, *ends)
            else:
                ends = (THOUGHT, RESPONSE, RESPONSE_END, MESSAGE_END, *tools)
                marker = yield from source.pass_until(TextPiece, *ends)
            if marker is None:
                return
            in_thought = marker == THOUGHT
            if marker == TOOLS:
                source.begin(marker)
                try:
                    yield from _read_calls(source, offer.tools)
                except NoCall:
                    source.fail()
                else:
                    source.forget()


def _thought() -> TagPart:
    """Return the grammar of an element of reasoning."""
    return text_until(THOUGHT_END, THOUGHT, (RESPONSE, TOOLS))


def _read_calls(source: Source, tools: ToolTable) -> Reading[None]:
    """Read the calls of an element of them."""
    names = {_escaped(tool): tool for tool in tools.schemas}
    yield from source.run(SPACE)
    yield from source.expect(CALL)
    while True:
        tool = names[(yield from source.expect(*names))]
        yield from source.expect('"')
        yield from source.run_without("<", NAME_CHARACTERS_MAX)  # the index of the call, which is that of its place
        yield from source.expect(SEP)
        yield from source.run(SPACE)
        first = yield from source.expect(ARGUMENT, OBJECT, CALL_END)
        if first == ARGUMENT:
            arguments = yield from _read_arguments(source, tools, tool)
        else:
            arguments = (yield from _read_object(source)) if first == OBJECT else {}
        source.call(tool, encoded(arguments))
        yield from source.run(SPACE)
        if (yield from source.expect(CALL, TOOLS_END)) == TOOLS_END:
            return


def _read_object(source: Source) -> Reading[object]:
    """Read the arguments of a call that are one JSON object, and its end."""
    text = yield from json_value(source)
    yield from source.run(SPACE)
    yield from source.expect(OBJECT_END)
    yield from source.run(SPACE)
    yield from source.expect(CALL_END)
    try:
        value = decoded(text)
    except ValueError:
        raise NoCall from None
    if not isinstance(value, dict):
        raise NoCall
    return value


def _read_arguments(source: Source, tools: ToolTable, tool: str) -> Reading[object]:
    """Read the arguments of a call behind the first `ARGUMENT`, and its end."""

    def follow(_: str, __: str) -> Reading[Argument | None]:
        """Read up to the next value, and return its tag; None at the end of the call."""
        yield from source.run(SPACE)
        if (yield from source.expect(ARGUMENT, CALL_END)) == ARGUMENT:
            return (yield from _argument(source))
        yield from source.run(SPACE)
        if (yield from source.starts_with(CALL, TOOLS_END)) is None and not (yield from at_end(source)):
            raise NoCall
        return None

    arguments = dict[str, object]()
    argument: Argument | None = yield from _argument(source)
    while argument is not None:
        types = _types(types_of(tools, tool, argument.key), argument.kind)
        text, following = yield from raw_value(source, (ARGUMENT_END,), follow, json=is_json(types))
        arguments[argument.key], argument = value_of(text, types), following
    return arguments


def _argument(source: Source) -> Reading[Argument]:
    """Read the rest of the tag of an argument behind the quotation mark of its key."""
    key = yield from source.run_without('"<', KEY_CHARACTERS_MAX)
    yield from source.expect('"')
    yield from source.run(SPACE)
    kind = ""
    if (yield from source.expect('type="', SEP)) != SEP:
        kind = yield from source.run_without('"<', NAME_CHARACTERS_MAX)
        yield from source.expect('"')
        yield from source.expect(SEP)
    return Argument(unescape(key), kind)


def _types(types: frozenset[str], kind: str) -> frozenset[str]:
    """Return the types of an argument: the one of its tag, unless the schema has no such type."""
    if kind == "string":
        return STRING if not types or "string" in types else types
    if not kind or (types and kind not in types and not (kind == "number" and "integer" in types)):
        return types
    return NUMBERS if kind == "number" else frozenset({kind})


def _escaped(text: str) -> str:
    """Return a text as it stands in an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")
