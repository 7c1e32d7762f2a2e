"""Facts about what a chat template does with tools, calls and results, learned by rendering sentinels.

Templates differ in what they take: the arguments of a call as an object or as JSON text, an answer without text as null
or as an empty text, an id of any form or of nine characters. What is tried first is what transformers' own templates
are written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from hashlib import blake2b
from itertools import product, takewhile
from typing import TypeAlias

from attrs import evolve, frozen

from actors.text.template_facts import SENTINEL, TemplateMessage
from protocol.messages.text import Role, Turn
from protocol.messages.tools import Tool, ToolCall, read_arguments

TemplateTool: TypeAlias = Mapping[str, object]

RenderTools: TypeAlias = Callable[[Sequence[TemplateMessage], Sequence[TemplateTool] | None], str]
"""Renders a conversation with tools; raises anything for one that is refused."""

SHORT_ID_CHARACTERS = 9  # of Mistral's templates


class TextBeside(Enum):
    """The place of a text beside the calls of an answer."""

    KEPT = auto()  # beside them
    APART = auto()  # in an answer of its own before them
    LEFT_OUT = auto()  # nowhere: a model is not trained to see it again


class Ids(Enum):
    """The ids of calls that a template takes."""

    ANY = auto()
    SHORT = auto()  # nine letters and digits
    NAMED = auto()  # the name and the number of the call, which the template writes in place of the name


@frozen
class ToolFacts:
    """The ways of a chat template with tools."""

    shows_tools: bool = False  # the name, the description and the parameters of a tool reach the prompt
    shows_calls: bool = False  # so do the name and the arguments of a call, and the result
    several_calls: bool = False
    arguments_as_text: bool = False
    empty_content: str | None = ""  # of an answer that is calls alone
    ids: Ids = Ids.ANY
    text_beside: TextBeside = TextBeside.KEPT

    def add(self, message: dict[str, object], turn: Turn, names: Mapping[str, str], numbers: Mapping[str, int]) -> None:
        """Add the calls of a turn to its message, or the call whose result it is; `names` and `numbers` are by id."""
        if turn.calls:
            message["tool_calls"] = [self._call(call, numbers) for call in turn.calls]
            if not message["content"]:
                message["content"] = self.empty_content
        if turn.call_id:
            name = names.get(turn.call_id, "")
            message["tool_call_id"] = self.call_id(turn.call_id, name, numbers.get(turn.call_id, 0))
            message["name"] = name

    def call_id(self, given: str, name: str, number: int) -> str:
        """Return the id of a call as the template takes it."""
        match self.ids:
            case Ids.ANY:
                return given
            case Ids.NAMED:
                return f"functions.{name}:{number}"
            case Ids.SHORT:
                return blake2b(given.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:SHORT_ID_CHARACTERS]

    def _call(self, call: ToolCall, numbers: Mapping[str, int]) -> dict[str, object]:
        arguments: object = call.arguments if self.arguments_as_text else read_arguments(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {
            "id": self.call_id(call.id, call.name, numbers.get(call.id, 0)),
            "type": "function",
            "function": function,
        }


def template_tool(tool: Tool) -> TemplateTool:
    """Return a tool as templates read it, in the order of keys in which models were trained."""
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": function}


def learn_tools(render: RenderTools, user: object) -> ToolFacts:
    """Return the facts about a template; `user` is the content of a user's message as the template takes it."""
    name, description, key, value, result, id_, beside_text = map(SENTINEL.format, range(10, 17))
    name, key, id_ = f"f{name}", f"k{key}", f"c{id_}"
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": "x"}}}
    tools = [template_tool(Tool(name, description, json.dumps(parameters)))]
    asked = {"role": "user", "content": user}

    def rendered(messages: Sequence[TemplateMessage]) -> str:
        try:
            return render(messages, tools)
        except Exception:  # noqa: BLE001  # a template may raise anything to refuse a conversation
            return ""

    shown = rendered([asked])
    if not all(text in shown for text in (name, description, key)):
        return ToolFacts()
    for ids, as_text, empty in product(Ids, (False, True), (None, "")):
        facts = ToolFacts(True, True, arguments_as_text=as_text, empty_content=empty, ids=ids)
        one, two = (rendered([asked, *_answered(facts, id_, name, key, value, result, count)]) for count in (1, 2))
        kept = partial(_keeps_calls, shown=shown, name=name, key=key, value=value, result=result)
        # A result may have the name of its call, which says nothing about the call itself.
        called = rendered([asked, *_answered(facts, id_, name, key, value, result, 1)[:1]])
        if kept(one, 1) and (not called or called.count(name) > shown.count(name)):
            beside = _text_beside(rendered, asked, _answered(facts, id_, name, key, value, result, 1), beside_text)
            return evolve(facts, several_calls=kept(two, 2), text_beside=beside)
    return ToolFacts(shows_tools=True)


def _text_beside(
    rendered: Callable[[Sequence[TemplateMessage]], str],
    asked: TemplateMessage,
    answered: Sequence[TemplateMessage],
    beside_text: str,
) -> TextBeside:
    """Return the place of a text beside calls."""
    called, *results = answered
    if beside_text in rendered([asked, {**called, "content": beside_text}, *results]):
        return TextBeside.KEPT
    apart = rendered([asked, {"role": Role.ASSISTANT.value, "content": beside_text}, *answered])
    return TextBeside.APART if beside_text in apart else TextBeside.LEFT_OUT


def _answered(
    facts: ToolFacts, id_: str, name: str, key: str, value: str, result: str, count: int
) -> list[dict[str, object]]:
    """Return an answer with so many calls, and their results."""
    calls = tuple(ToolCall(f"{id_}{index}", name, json.dumps({key: f"{value}{index}"})) for index in range(count))
    numbers = {call.id: number for number, call in enumerate(calls)}
    names = dict.fromkeys(numbers, name)
    turns = [Turn(Role.ASSISTANT, "", calls=calls)]
    turns += [Turn(Role.TOOL, f"{result}{number}", call_id=call.id) for number, call in enumerate(calls)]
    messages = list[dict[str, object]]()
    for turn in turns:
        messages.append({"role": turn.role.value, "content": turn.content})
        facts.add(messages[-1], turn, names, numbers)
    return messages


def _keeps_calls(prompt: str, count: int, *, shown: str, name: str, key: str, value: str, result: str) -> bool:
    """Return whether a prompt has so many calls and results, their arguments as models write them."""

    def more(text: str) -> int:
        return prompt.count(text) - shown.count(text)

    texts = [f"{each}{index}" for index in range(count) for each in (value, result)]
    if not all(text in prompt for text in texts) or more(name) < count:
        return False
    # The arguments of the other kind come out as Python's text of an object, or with escaped quotation marks.
    if more(f"'{key}'") or more(f'\\"{key}') or more("None"):
        return False
    return more(key) >= count


def with_calls_apart(turns: Sequence[Turn], facts: ToolFacts) -> list[Turn]:
    """Return a conversation in which each answer has as much beside a call as the template renders.

    Where it renders one call an answer, each call has one of its own, with its results directly behind it. Where it
    leaves out the text beside calls, that text is an answer of its own before them, or else it is left out.
    """
    out, given = list[Turn](), set[int]()
    for place, turn in enumerate(turns):
        if turn.calls and turn.content and facts.text_beside is not TextBeside.KEPT:
            if facts.text_beside is TextBeside.APART:
                out.append(evolve(turn, calls=()))
            turn = evolve(turn, content="")  # noqa: PLW2901
        if len(turn.calls) > 1 and not facts.several_calls:
            # A later answer may have calls with the same ids.
            results = list(takewhile(lambda each: each.call_id, turns[place + 1 :]))
            later = Turn(turn.role, "", param=turn.param)
            for index, call in enumerate(turn.calls):
                behind = [each for each in results if each.call_id == call.id]
                out += [evolve(later if index else turn, calls=(call,)), *behind]
                given |= set(map(id, behind))
        elif id(turn) not in given:
            out.append(turn)
    return out
