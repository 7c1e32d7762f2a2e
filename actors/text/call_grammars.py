"""The grammars for the calls of requests: each is made once, in a thread, and remembered while it is used.

An agent sends the same tools with every turn, and to decide their schemas takes milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import trio
from attrs import Factory, define

from actors.kit.offload import RunWork
from actors.text.call_grammar import BESIDE, HeldCalls, call_grammar, demands, holds_calls
from actors.text.formats.table import AnswerFormat
from protocol.errors import BadRequest, Unsupported
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import WORDS
from protocol.messages.text import Respond
from protocol.messages.tools import Tool, ToolChoice

CHARACTER_WORK = 64  # the work for one character of a schema, in characters to tokenise
REMEMBERED_CHARACTERS_MAX = 8 * 2**20

Key: TypeAlias = tuple[tuple[tuple[str, str, bool, str], ...], ToolChoice, bool, bool, bool, Grammar | None]
"""What a grammar depends on: of each tool its name, its parameters, whether it is strict, and its name in refusals.

Behind the choice stand whether several calls are allowed, whether the prompt ends within reasoning or within the text
of an answer, and the client's grammar of the text.
"""


@define(eq=False)
class CallGrammars:
    """Makes the grammars for the calls of one model, and remembers those that were used last."""

    answers: AnswerFormat
    _made: OrderedDict[Key, HeldCalls | BadRequest] = Factory(OrderedDict)
    _characters: int = 0
    _making: WeakValueDictionary[Key, trio.Lock] = Factory(WeakValueDictionary)

    async def held(
        self, request: Respond, grammars: Sequence[GrammarKind], run: RunWork, *, thinking: bool = False
    ) -> HeldCalls | None:
        """Return what the calls of a request are held to, by an engine with these kinds of grammars; None for nothing.

        Raises `BadRequest` with the client's name of what cannot be kept.
        """
        await trio.lowlevel.checkpoint()
        if request.tools and self.answers.tools is None:
            sentence = "this model has no known format of calls; in the file of its operator, `tools` can name one"
            raise Unsupported(sentence, param=request.param("tools"))
        beside = request.grammar
        if not holds_calls(request.tools, request.tool_choice, beside):
            return None
        demanding = demands(request.tool_choice)
        param = request.param("tool_choice" if demanding else "tools")
        if beside is not None and (demanding or beside.kind is GrammarKind.STRUCTURAL_TAG):
            own = request.param("grammar")
            raise Unsupported(f"cannot stand beside {own}: an answer keeps to one grammar at most", param=param)
        if request.tokens_min:
            least = request.param("tokens_min")
            raise BadRequest(f"an answer ends where its grammar does, which {param} asks for", param=least)
        if beside is not None:
            param = request.param("grammar")
        if GrammarKind.STRUCTURAL_TAG not in grammars:
            raise Unsupported("the engine of this model cannot be held to calls of tools", param=param)
        tools = tuple((tool.name, tool.parameters, tool.strict, tool.param) for tool in request.tools)
        begun = request.rendering.continues
        key = tools, request.tool_choice, request.parallel_calls, thinking, begun, beside
        made = await self._remembered(key, request.tools, run)
        if isinstance(made, BadRequest):
            name = request.param("grammar") if made.param == BESIDE else made.param
            raise type(made)(made.detail, param=name or param)
        return made

    async def _remembered(self, key: Key, tools: Sequence[Tool], run: RunWork) -> HeldCalls | BadRequest:
        if (made := self._made.get(key)) is None:
            async with self._making.setdefault(key, trio.Lock()):
                if (made := self._made.get(key)) is None:
                    characters = sum(len(tool.parameters) for tool in tools) + _text_size(key)
                    work = CHARACTER_WORK * characters
                    made = await run(work, partial(_made, tools, key, self.answers))
                    self._remember(key, made)
        self._made.move_to_end(key)
        return made  # noqa: ASYNC910  # its caller has had a checkpoint

    def _remember(self, key: Key, made: HeldCalls | BadRequest) -> None:
        self._characters += _size(key, made)
        self._made[key] = made
        while self._characters > REMEMBERED_CHARACTERS_MAX and len(self._made) > 1:
            self._characters -= _size(*self._made.popitem(last=False))


def refused_as_tools(error: BadRequest, request: Respond) -> BadRequest:
    """Return the error of a checker about the grammar for a request's calls, in words for the author of the tools."""
    detail = error.detail.replace(WORDS[GrammarKind.STRUCTURAL_TAG], "the grammar of these tools")
    return BadRequest(detail, param=request.param("tools"))


def _made(tools: Sequence[Tool], key: Key, answers: AnswerFormat) -> HeldCalls | BadRequest:
    _, choice, parallel, thinking, begun, beside = key
    try:
        made = call_grammar(tools, choice, answers, parallel=parallel, thinking=thinking, begun=begun, beside=beside)
    except BadRequest as error:
        # Without its traceback, which has the request.
        return type(error)(error.detail, param=error.param)
    assert made is not None
    return made


def _size(key: Key, made: HeldCalls | BadRequest) -> int:
    tools = sum(len(name) + len(parameters) for name, parameters, *_ in key[0]) + _text_size(key)
    if isinstance(made, BadRequest):
        return tools + len(made.detail)
    return tools + sum(map(len, made.schemas.values())) + len(made.grammar.text)


def _text_size(key: Key) -> int:
    """Return the characters of the grammar of the text."""
    beside = key[-1]
    return 0 if beside is None else len(beside.text)
