"""The grammar for the tools of a request is made once, in a thread, and refused in the client's own words."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.offload import OFFLOAD_SIZE_MIN, run_inline
from actors.text import call_grammars
from actors.text.call_grammar import HeldCalls
from actors.text.call_grammars import CallGrammars, refused_as_tools
from actors.text.formats.table import TOOLS, AnswerFormat
from protocol.errors import BadRequest, Unsupported
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import Rendering, Respond, Role, Turn
from protocol.messages.tools import Tool, ToolChoice
from tests.rig.marked_calls import Marked

HERMES = AnswerFormat("hermes")
ALL = tuple(GrammarKind)
REQUIRED = ToolChoice(required=True)
PARAMS = {"tools": "my tools", "tool_choice": "my choice", "grammar": "my format", "tokens_min": "my least"}


def tool(name: str, **fields: Any) -> Tool:
    return Tool(name, parameters=json.dumps({"type": "object", "properties": {name: {"type": "integer"}}}), **fields)


def respond(*tools: Tool, choice: ToolChoice = REQUIRED, **fields: Any) -> Respond:
    rendering = Rendering(tools=tools)
    return Respond("a" * 32, (Turn(Role.USER, "x"),), rendering, choice, params=PARAMS, **fields)


class Runs:
    """Runs work in place, and notes its sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, size: int, function: Any, /) -> Any:
        self.sizes.append(size)
        return await run_inline(function, owner="", size=size)


async def test_a_grammar_is_made_once(autojump_clock: MockClock) -> None:
    grammars, run = CallGrammars(HERMES), Runs()
    found = list[HeldCalls | None]()

    async def ask() -> None:
        found.append(await grammars.held(respond(tool("a"), tool("b")), ALL, run))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert len(set(map(id, found))) == 1
    assert found[0] is not None
    assert len(run.sizes) == 1
    assert run.sizes[0] > OFFLOAD_SIZE_MIN


async def test_a_refusal_is_remembered_as_well(autojump_clock: MockClock) -> None:
    grammars, run = CallGrammars(HERMES), Runs()
    for param in ("tools[0].x", "tools[0].x", "tools[1].x"):
        with pytest.raises(BadRequest) as raised:
            await grammars.held(respond(Tool("a", parameters='{"not":{}}', strict=True, param=param)), ALL, run)
        assert raised.value.param == param
    assert len(run.sizes) == 2


async def test_what_was_used_last_is_remembered(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_grammars, "REMEMBERED_CHARACTERS_MAX", 2_000)
    grammars, run = CallGrammars(HERMES), Runs()
    for number in range(10):
        await grammars.held(respond(tool("used")), ALL, run)
        await grammars.held(respond(tool(f"t{number}")), ALL, run)
    assert len(run.sizes) == 11
    await grammars.held(respond(tool("t0")), ALL, run)
    assert len(run.sizes) == 12


async def test_a_request_with_another_choice_or_schema_has_another_grammar(autojump_clock: MockClock) -> None:
    grammars, run, texts = CallGrammars(HERMES), Runs(), set[str]()
    a, strict = tool("a"), evolve(tool("a"), strict=True)
    asked = [
        respond(a),
        respond(a, parallel_calls=False),
        respond(a, tool("b")),
        respond(a, tool("b"), choice=ToolChoice(name="b")),
        respond(strict, choice=ToolChoice()),
        respond(a, choice=ToolChoice(), grammar=Grammar(GrammarKind.REGEX, "a")),
        respond(a, choice=ToolChoice(), grammar=Grammar(GrammarKind.REGEX, "b")),
    ]
    for request in asked:
        held = await grammars.held(request, ALL, run)
        assert held is not None
        texts.add(held.grammar.text)
    assert len(texts) == len(asked)


async def test_a_prompt_that_ends_within_a_thought_has_another_grammar(autojump_clock: MockClock) -> None:
    grammars, run = CallGrammars(AnswerFormat("hermes", "think")), Runs()
    held = [await grammars.held(respond(tool("a")), ALL, run, thinking=thinking) for thinking in (False, True)]
    assert None not in held
    assert held[0] != held[1]


async def test_free_calls_cost_nothing(autojump_clock: MockClock) -> None:
    run = Runs()
    assert await CallGrammars(HERMES).held(respond(tool("a"), choice=ToolChoice()), (), run) is None
    assert await CallGrammars(AnswerFormat()).held(respond(), (), run) is None
    assert run.sizes == []


@pytest.mark.parametrize(
    ("request_", "answers", "kinds", "kind", "param", "reason"),
    [
        (respond(tool("a")), AnswerFormat(), ALL, Unsupported, "my tools", "no known format of calls"),
        (
            respond(tool("a"), choice=ToolChoice(), grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"not":{}}')),
            *(HERMES, ALL, BadRequest, "my format", "#: not: "),
        ),
        (
            respond(tool("a"), grammar=Grammar(GrammarKind.REGEX, "a")),
            HERMES,
            ALL,
            Unsupported,
            "my choice",
            "my format",
        ),
        (respond(tool("a"), tokens_min=3), HERMES, ALL, BadRequest, "my least", "my choice"),
        (respond(tool("a")), HERMES, (GrammarKind.REGEX,), Unsupported, "my choice", "cannot be held to calls"),
        (respond(tool("a", strict=True), choice=ToolChoice()), HERMES, (), Unsupported, "my tools", "cannot be held"),
        (
            respond(Tool("a", parameters='{"not":{}}', strict=True, param="tools[0].x")),
            *(HERMES, ALL, BadRequest, "tools[0].x", "#: not: "),
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_the_clients_name(
    request_: Respond,
    answers: AnswerFormat,
    kinds: tuple[GrammarKind, ...],
    kind: type[BadRequest],
    param: str,
    reason: str,
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(kind, match=reason) as raised:
        await CallGrammars(answers).held(request_, kinds, Runs())
    assert type(raised.value) is kind
    assert raised.value.param == param


async def test_calls_and_a_format_of_the_text_are_refused_together_in_a_format_without_a_grammar(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("dict[str, object]", TOOLS), "marked", Marked())
    request = respond(tool("a"), choice=ToolChoice(), grammar=Grammar(GrammarKind.REGEX, "a"))
    with pytest.raises(
        Unsupported, match=r"cannot stand together .*, which writes its calls in the format marked"
    ) as it:
        await CallGrammars(AnswerFormat("marked")).held(request, ALL, Runs())
    assert it.value.param == "my format"


def test_a_costly_grammar_is_refused_as_the_clients_tools() -> None:
    found = refused_as_tools(BadRequest("this structural tag takes more than 2 s to compile"), respond())
    assert (found.detail, found.param) == ("the grammar of these tools takes more than 2 s to compile", "my tools")


async def test_a_clients_structural_tag_describes_calls_itself(autojump_clock: MockClock) -> None:
    own = Grammar(GrammarKind.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}')
    run = Runs()
    assert await CallGrammars(HERMES).held(respond(tool("a"), choice=ToolChoice(), grammar=own), ALL, run) is None
    assert run.sizes == []
