"""The grammar of an answer that has to call tools, or that calls tools with strict schemas.

A choice of tools (`required`, or one by its name) demands calls, and the answer ends behind them. With strict tools an
answer is free until a call begins. Beside a grammar for its text, an answer is either calls or that text. In any case
each call is held to the schema of its tool: the schema is decided and written anew as that of a JSON format is. A tool
that is not strict, and whose schema no engine can be held to, gets any object: its client does not count on the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from attrs import frozen

from actors.kit.offload import give_turn
from actors.text.engine_grammar import engine_grammar
from actors.text.formats.arguments import types_of
from actors.text.formats.call_tags import (
    TagPart,
    any_text,
    either,
    optional,
    regex,
    separated,
    sequence,
    tag,
    triggered,
)
from actors.text.formats.held_format import CallFrame, HeldArguments, HeldFormat
from actors.text.formats.parameter_tags import HeldParameter
from actors.text.formats.table import TOOLS, AnswerFormat, thought_marks
from actors.text.formats.tool_table import ToolTable
from actors.text.thought_grammar import behind_thought, structural_tag, tag_part, text_answer
from protocol.errors import BadRequest, Unsupported
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.tools import Tool, ToolChoice
from protocol.schemas.enforceable import Unenforceable
from protocol.schemas.parameters import Parameter, parameters

ANY_OBJECT = '{"type":"object","additionalProperties":{}}'
CHARACTERS_MAX = 2 * 2**20  # of the grammar of all calls
BESIDE = "grammar"  # the parameter of a refusal of the grammar for the text
PARTS_A_TURN = 16  # tools and parameters that are written before other work has a turn


@frozen
class HeldCalls:
    """The grammar of an answer with calls, and what its calls keep to."""

    grammar: Grammar
    schemas: Mapping[str, str]  # the clients' own, by the names of the tools that are held to them
    demanded: bool  # an answer has at least one call


def holds_calls(tools: Sequence[Tool], choice: ToolChoice, beside: Grammar | None = None) -> bool:
    """Return whether a request needs a grammar for its calls, `beside` a grammar for the text of its answer.

    A client's structural tag describes a whole answer, calls included.
    """
    if not tools or choice.none:
        return False
    composed = beside is not None and beside.kind is not GrammarKind.STRUCTURAL_TAG
    return composed or demands(choice) or any(tool.strict for tool in tools)


def demands(choice: ToolChoice) -> bool:
    """Return whether an answer has to have a call."""
    return choice.required or choice.name is not None


def call_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    answers: AnswerFormat,
    *,
    parallel: bool,
    thinking: bool = False,
    begun: bool = False,
    beside: Grammar | None = None,
) -> HeldCalls | None:
    """Return the grammar of a request's calls, None if they are free.

    The prompt ends within reasoning if `thinking`, and within the text of an answer that goes on if `begun`. With a
    grammar of the text `beside`, an answer is either calls or that text.

    Raises `Unsupported` without a parameter if the format of the model has no grammar, and `BadRequest` with the tool's
    for a schema that no engine can be held to, or with `BESIDE` for the grammar of the text.
    """
    if not holds_calls(tools, choice, beside):
        return None
    its_format: object = None if answers.tools is None else TOOLS[answers.tools]
    if not isinstance(its_format, HeldFormat):
        what = "a call cannot be demanded" if demands(choice) else "strict tools cannot be kept to"
        if beside is not None:
            what = "tools and a format of the text cannot stand together in an answer"
        own = "has no format of calls" if answers.tools is None else f"writes its calls in the format {answers.tools}"
        raise Unsupported(f"{what} of this model, which {own}")
    content = None if beside is None else _text_part(beside)
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
    demanded = demands(choice)
    calls, schemas = _calls(its_format, tools, demanded=demanded)
    several = parallel and choice.name is None and not its_format.frame.alone
    if content is not None:
        text = text_answer(content, answers, begun=begun and not thinking)
        answer = either(_demanded(its_format.frame, calls, several=several), text)
    elif demanded:
        answer = _demanded(its_format.frame, calls, several=several)
    else:
        answer = _free(its_format, calls, answers, several=several)
    held = {tool.name: object_schema(tool) for tool in tools if schemas[tool.name] is not None}
    return HeldCalls(structural_tag(behind_thought(answer, answers, thinking=thinking)), held, demanded)


def _text_part(beside: Grammar) -> TagPart:
    try:
        part = tag_part(engine_grammar(beside))
    except BadRequest as error:
        error.param = BESIDE
        raise
    assert part is not None
    return part


def object_schema(tool: Tool) -> str:
    """Return the schema of a tool as one of objects alone; raises `BadRequest` for a schema without any."""
    schema = json.loads(tool.parameters)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadRequest("the parameters of a tool are the schema of an object", param=tool.param)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadRequest('the parameters of a tool are the schema of an object: its type is "object"', param=tool.param)
    return json.dumps({**schema, "type": "object"}, ensure_ascii=False, separators=(",", ":"))


def _calls(
    its_format: HeldFormat, tools: Sequence[Tool], *, demanded: bool
) -> tuple[list[TagPart], Mapping[str, str | None]]:
    """Return the grammar of a call of each tool, and the schema that an engine gets for it, None for any object."""
    calls, schemas = list[TagPart](), dict[str, str | None]()
    size, pause = 0, _paced_turns()
    for tool in tools:
        pause()
        schemas[tool.name] = schema = _engine_schema(tool, demanded=demanded)
        try:
            arguments = _arguments(tool, schema, its_format.frame, pause)
        except Unenforceable as error:
            if tool.strict:
                raise BadRequest(f"this JSON schema cannot be used: {error}", param=tool.param) from None
            schemas[tool.name] = None
            arguments = _arguments(tool, None, its_format.frame, pause)
        calls.append(its_format.call(tool.name, arguments))
        size += len(json.dumps(calls[-1]))
        if size > CHARACTERS_MAX:
            raise BadRequest(f"the grammar of these tools is too large: it has more than {CHARACTERS_MAX} characters")
    return calls, schemas


def _paced_turns() -> Callable[[], None]:
    """Return what is called before each tool and parameter, and lets other work have the thread now and then."""
    calls = count(1)

    def pause() -> None:
        if next(calls) % PARTS_A_TURN == 0:
            give_turn()

    return pause


def _engine_schema(tool: Tool, *, demanded: bool) -> str | None:
    """Return the schema that an engine gets for a tool's, None for any object."""
    if not tool.strict and not demanded:
        return None
    try:
        return engine_grammar(Grammar(GrammarKind.JSON_SCHEMA, object_schema(tool))).text
    except BadRequest as error:
        if not tool.strict:
            return None
        error.param = tool.param
        raise


def _arguments(tool: Tool, schema: str | None, frame: CallFrame, pause: Callable[[], None]) -> HeldArguments:
    """Return the arguments of a tool as the engine is held to them."""
    whole = json.loads(schema or ANY_OBJECT)
    if frame.names is None:
        return HeldArguments(whole)
    table = ToolTable.of([tool])
    read_as = partial(types_of, table, tool.name)
    own = ANY_OBJECT if schema is None else object_schema(tool)
    kinds = parameters(own, frame.plain_without or None, pause, read_as, frame.names, typed=frame.typed)

    def held(parameter: Parameter) -> HeldParameter:
        # The parser reads a value by the types of the client's schema. Without one, a value is any text.
        read_plain = schema is None or (parameter.name is not None and "string" in read_as(parameter.name))
        return HeldParameter(parameter, bool(frame.plain_without) and (frame.typed or read_plain), frame.typed)

    named = ToolTable.of([tool]).names(tool.name) if schema is None else ()
    listed = [held(Parameter(name, False, "any", None, "{}")) for name in named if frame.names.has(name)]
    return HeldArguments(whole, [[held(parameter) for parameter in kind] for kind in kinds], listed)


def _demanded(frame: CallFrame, calls: Sequence[TagPart], *, several: bool) -> TagPart:
    """Return the grammar of an answer of calls alone."""
    lead = () if frame.lead is None else (frame.lead,)
    return sequence(*lead, frame.begin, separated(calls, frame.separator, several=several), frame.end)


def _free(its_format: HeldFormat, calls: Sequence[TagPart], answers: AnswerFormat, *, several: bool) -> TagPart:
    """Return the grammar of a text in which the marker of a call begins one, and no other marker does."""
    frame = its_format.frame
    begins, bare = getattr(its_format, "begins", ()), getattr(its_format, "bare", "")
    excluded = [marker for marker in begins if marker != frame.trigger]
    alone = separated(calls, frame.separator, several=several)
    if bare:
        listed = sequence(frame.begin, alone, frame.end)
        first = _first_of_text(bare, (frame.trigger, *thought_marks(answers)[0]))
        before = optional(sequence(first, any_text([frame.trigger])))
        return either(listed, sequence(before, optional(sequence(frame.trigger, listed, frame.close))))
    marked = [tag(frame.begin, alone, frame.end)] if frame.begin else calls
    return triggered(frame.trigger, marked, several=several, excluded=excluded)


def _first_of_text(bare: str, markers: Sequence[str]) -> TagPart:
    """Return the grammar of the first characters of a text that begins neither as a bare call nor with a marker.

    A parser looks for both at the beginning of an answer, behind white space. What a marker begins with may be followed
    by anything but its second character.
    """
    firsts, seconds = ({re.escape(marker[place]) for marker in markers} for place in (0, 1))
    begin, other = "".join(sorted(firsts)), "".join(sorted(seconds))
    return regex(f"[^{re.escape(bare)}{begin} \\t\\n\\r]|[{begin}][^{begin}{other}]")
