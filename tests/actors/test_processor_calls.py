"""The processor holds the calls of a request to its tools: the engine gets a grammar, and the calls are judged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.fast_path import FastPath
from actors.kit.offload import run_inline
from actors.processor import GrammarCheck, accept_any_grammar, processor
from actors.text.formats.table import AnswerFormat
from actors.text.formats.tool_table import ToolTable
from protocol.errors import AnswerInvalid, BadRequest, Unsupported
from protocol.messages.generation import FinishReason, Grammar, GrammarKind
from protocol.messages.text import CallPart, ChoiceEnded, Rendering, Respond, Role, Text, Turn
from protocol.messages.tools import AUTO, Tool, ToolChoice
from tests.actors.test_processor import LIMITS, ask, respond, running
from tests.rig.calls import AnyAddress, mailbox
from tests.rig.gateway import TINY, Worker, ids
from tests.rig.tools import SHOWING

HERMES = evolve(TINY, template=SHOWING, answers=AnswerFormat("hermes"))
ROOM = evolve(LIMITS, total_max=1000, prompt_max=1000)
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
STRICT = Tool("f", parameters=json.dumps(SCHEMA), strict=True)
REQUIRED = ToolChoice(required=True)


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def asking(line: str, tool: Tool = STRICT, choice: ToolChoice = REQUIRED, **fields: Any) -> Respond:
    return respond(f"n={len(ids(line))}", rendering=Rendering(tools=(tool,)), tool_choice=choice, **fields)


@asynccontextmanager
async def checked(worker: Worker, check: GrammarCheck = accept_any_grammar) -> AsyncIterator[AnyAddress]:
    address, inbox = mailbox(4)
    async with trio.open_nursery() as nursery:
        run = partial(processor, inbox, HERMES, worker, lambda: ROOM, run_inline, 4, check)
        await nursery.start(run)
        yield address
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("n", [1, 2])
async def test_the_engine_gets_the_grammar_and_the_client_the_calls(n: int, autojump_clock: MockClock) -> None:
    line, worker = call('{"city": "Paris"}') + "\n" + call('{"city":"Paris"}'), Worker()
    worker.line = line
    async with running(worker, HERMES, ROOM) as address:
        replies, answered = await ask(address, asking(line, n=n))
    grammars = [request.sampling.grammar for request in worker.asked]
    assert [grammar.kind for grammar in grammars if grammar is not None] == n * [GrammarKind.STRUCTURAL_TAG]
    for choice in range(n):
        parts = [reply for reply in replies if isinstance(reply, CallPart) and reply.choice == choice]
        assert [(part.index, part.name, json.loads(part.arguments)) for part in parts] == [
            (0, "f", {"city": "Paris"}),
            (1, "f", {"city": "Paris"}),
        ]
    assert answered.usage.completion_tokens == n * len(ids(line))


async def test_calls_of_tools_that_are_not_strict_are_free(autojump_clock: MockClock) -> None:
    line = call('{"city": 5}')
    worker = Worker()
    worker.line = line
    async with running(worker, HERMES, ROOM) as address:
        replies, _ = await ask(address, asking(line, evolve(STRICT, strict=False), AUTO))
    assert worker.asked[0].sampling.grammar is None
    assert [reply.name for reply in replies if isinstance(reply, CallPart)] == ["f"]


@pytest.mark.parametrize("fields", [{}, {"n": 1, "best_of": 2}, {"stop_included": True}], ids=str)
async def test_a_call_in_which_a_stop_string_ends_the_answer_reaches_nobody(
    fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    line, worker = "Hm. " + call('{"city": "Paris"}'), Worker()
    worker.line = line
    async with running(worker, HERMES, ROOM) as address:
        asked = asking(line, evolve(STRICT, strict=False), AUTO, stop=("Paris",), **fields)
        replies, _ = await ask(address, asked)
    assert "".join(reply.text for reply in replies if isinstance(reply, Text)) == "Hm. "
    assert not [reply for reply in replies if isinstance(reply, CallPart)]
    assert [reply.matched for reply in replies if isinstance(reply, ChoiceEnded)] == ["Paris"]


@pytest.mark.parametrize("choice", [AUTO, REQUIRED, ToolChoice(name="f")])
@pytest.mark.parametrize("fields", [{}, {"n": 1, "best_of": 2}], ids=str)
async def test_a_call_that_does_not_validate_reaches_nobody(
    choice: ToolChoice, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    line, replies = "Hm. " + call('{"city": "Paris"}') + call('{"city": "Bonn"}'), list[Any]()
    worker = Worker()
    worker.line = line
    async with running(worker, HERMES, ROOM) as address:
        with pytest.raises(AnswerInvalid, match="does not keep to the schema of the tool"):
            async with address.ask(asking(line, choice=choice, **fields), 10_000) as answer:
                async for reply in answer:
                    replies.append(reply)  # those before the error count
                await answer.result()
    assert not [reply for reply in replies if isinstance(reply, CallPart | ChoiceEnded)]


async def test_text_behind_a_call_waits_though_a_fast_path_is_open(autojump_clock: MockClock) -> None:
    line, replies = "An oak. " + call('{"city": "Paris"}') + " An oak.", list[Any]()
    worker = Worker()
    worker.line = line

    def receive(text: Text, _: float) -> None:
        replies.append(text)

    async with running(worker, HERMES, ROOM) as address, address.ask(asking(line, choice=AUTO), 1000) as answer:
        await answer.relay(replies.append, fast_path=FastPath(receive))
    place = next(place for place, reply in enumerate(replies) if isinstance(reply, CallPart))
    texts = [
        "".join(reply.text for reply in part if isinstance(reply, Text)) for part in (replies[:place], replies[place:])
    ]
    assert texts == ["An oak. ", " An oak."]


async def test_a_demanded_call_that_is_missing_is_an_invalid_answer(autojump_clock: MockClock) -> None:
    async with running(Worker(), HERMES, ROOM) as address:
        with pytest.raises(AnswerInvalid, match="calls no tool"):
            await ask(address, asking("An oak"))
        with pytest.raises(BadRequest, match="stop ended the answer"):
            await ask(address, asking("The oak is old", stop=("oak",)))
        replies, _ = await ask(address, asking("The oak is old", tokens_max=2))
    assert isinstance(replies[-1], ChoiceEnded), "one that was cut is not whole"


async def test_the_grammar_is_tried_as_it_is_and_refused_as_the_tools(autojump_clock: MockClock) -> None:
    seen = list[tuple[Grammar, bool]]()

    async def check(grammar: Grammar, _: str, /, *, decided: bool = False) -> Grammar:
        await trio.lowlevel.checkpoint()
        seen.append((grammar, decided))
        raise BadRequest("this structural tag needs too much memory")

    async with checked(Worker(), check) as address:
        with pytest.raises(BadRequest, match="the grammar of these tools needs") as raised:
            await ask(address, asking("x", params={"tools": "my tools"}))
    assert raised.value.param == "my tools"
    assert [(grammar.kind, decided) for grammar, decided in seen] == [(GrammarKind.STRUCTURAL_TAG, True)]


async def test_a_model_without_a_format_refuses_demanded_calls(autojump_clock: MockClock) -> None:
    async with running(Worker(), TINY, ROOM) as address:
        with pytest.raises(Unsupported, match="no known format of calls") as raised:
            await ask(address, asking("x", params={"tools": "my tools"}))
        assert raised.value.param == "my tools"
        plain = Respond("a" * 32, (Turn(Role.USER, "n=2"),))
        assert (await ask(address, plain))[0]


@pytest.mark.parametrize("tools", [(Tool("f"),), ()])
async def test_the_tools_are_read_once_a_request(
    tools: tuple[Tool, ...], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Each choice read them anew on the event loop: 128 choices with 4 MiB of tools took seconds."""
    tables, of = list[ToolTable](), ToolTable.of

    def noted(tools: Sequence[Tool]) -> ToolTable:
        tables.append(of(tools))
        return tables[-1]

    monkeypatch.setattr(ToolTable, "of", noted)
    line = call('{"city": "Paris"}')
    async with running(Worker(line=line), HERMES, ROOM) as address:
        replies, _ = await ask(address, respond(f"n={len(ids(line))}", rendering=Rendering(tools=tools), n=3))
    assert len(tables) == len(tools)
    assert len([reply for reply in replies if isinstance(reply, CallPart)]) == 3 * len(tools)


FORMAT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
FREE = evolve(STRICT, strict=False)


async def test_beside_a_format_of_the_text_an_answer_calls_a_tool_or_keeps_to_it(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, HERMES, ROOM) as address:
        for line, count in ((call('{"city": "Rome"}'), 1), ('{"a": 3}', 0)):
            worker.line = line
            replies, _ = await ask(address, asking(line, FREE, AUTO, grammar=FORMAT))
            assert sum(isinstance(reply, CallPart) for reply in replies) == count
            assert (grammar := worker.asked[-1].sampling.grammar) is not None
            assert json.loads(grammar.text)["format"]["type"] == "or"
        worker.line = '{"a": "x"}'
        with pytest.raises(AnswerInvalid):
            await ask(address, asking(worker.line, FREE, AUTO, grammar=FORMAT))
        worker.line = call('{"city": "Rome"}')
        with pytest.raises(AnswerInvalid, match="does not keep to the schema of the tool"):
            await ask(address, asking(worker.line, STRICT, AUTO, grammar=FORMAT))


async def test_without_parallel_calls_an_answer_ends_behind_its_first(autojump_clock: MockClock) -> None:
    line, worker = "Hm. " + call('{"city": "Rome"}') + "\n" + call('{"city": "Oslo"}') + " An oak.", Worker()
    worker.line = line
    async with running(worker, HERMES, ROOM) as address:
        both, all_of_it = await ask(address, asking(line, FREE, AUTO))
        one, answered = await ask(address, asking(line, FREE, AUTO, parallel_calls=False))
    calls = [[reply for reply in replies if isinstance(reply, CallPart)] for replies in (both, one)]
    assert [len(each) for each in calls] == [2, 1]
    assert calls[1][0].arguments == '{"city": "Rome"}'
    assert "".join(reply.text for reply in one if isinstance(reply, Text)) == "Hm. "
    assert isinstance(one[-1], ChoiceEnded)
    assert (one[-1].reason, one[-1].matched) == (FinishReason.STOP, None)
    assert 0 < answered.usage.completion_tokens < all_of_it.usage.completion_tokens - len(ids('{"city": "Oslo"}'))


async def test_without_parallel_calls_an_answer_without_any_is_whole(autojump_clock: MockClock) -> None:
    line, worker = "An oak, and <b>.", Worker()
    worker.line = line
    async with running(worker, HERMES, ROOM) as address:
        replies, _ = await ask(address, asking(line, FREE, AUTO, parallel_calls=False))
    assert "".join(reply.text for reply in replies if isinstance(reply, Text)) == line
