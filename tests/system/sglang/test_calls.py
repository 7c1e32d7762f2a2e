"""Demanded calls on the real engine: in each format an answer ends by itself, in a call that our parser reads."""

from __future__ import annotations

import json
from itertools import product

import pytest
import trio

from actors.engines.port import Engine
from actors.text.call_grammar import call_grammar
from actors.text.conformance import SchemaValidator
from actors.text.formats.held_format import HeldFormat
from actors.text.formats.table import TOOLS, AnswerFormat
from protocol.messages.generation import FinishReason, Grammar
from protocol.messages.tools import Tool, ToolChoice
from tests.contracts.engine import complete, request
from tests.rig.gateway import TINY
from tests.rig.written_calls import parsed
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

WITHIN_S = 120.0
TOKENS_MAX = 400
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "near": {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 2},
    },
    "required": ["city", "code"],
}
OFFERED = (Tool("get_weather", parameters=json.dumps(SCHEMA), strict=True), Tool("now", strict=True))
CHOICES = (ToolChoice(required=True), ToolChoice(name="get_weather"))
FORMATS = [name for name, each in TOOLS.items() if isinstance(each, HeldFormat)]


def without_thought(grammar: Grammar) -> Grammar:
    """Return a grammar without the thought that may come first: it has no end that a model has to write."""
    tag = json.loads(grammar.text)
    elements = tag["format"].get("elements", [])
    if elements and elements[0].get("elements", [{}])[0].get("type") == "optional":
        elements[0]["elements"].pop(0)
    return Grammar(grammar.kind, json.dumps(tag))


async def written(engine: Engine, grammar: Grammar, temperature: float) -> tuple[str, FinishReason]:
    """Return an answer and how it ended."""
    wanted = request(engine, TOKENS_MAX, temperature=temperature, grammar=grammar, ignore_eos=False)
    with trio.fail_after(WITHIN_S):
        tokens, finished = await complete(engine, wanted)
    return TINY.tokenizer.decode(tokens, skip_special_tokens=True), finished.reason


@pytest.mark.parametrize(
    ("choices", "temperatures"), [(CHOICES[:1], (0.0,)), pytest.param(CHOICES, (0.0, 1.0), marks=pytest.mark.nightly)]
)
async def test_a_demanded_call_ends_by_itself_in_each_format(
    choices: tuple[ToolChoice, ...], temperatures: tuple[float, ...], make_engine: MakeEngine
) -> None:
    async with make_engine() as engine:
        for name, choice, temperature in product(FORMATS, choices, temperatures):
            held = call_grammar(OFFERED, choice, AnswerFormat(name), parallel=False)
            assert held is not None
            text, reason = await written(engine, without_thought(held.grammar), temperature)
            assert reason is FinishReason.STOP, (name, text)
            found = parsed(text, AnswerFormat(name), OFFERED)
            assert found.text == "", (name, text)
            [(tool, arguments)] = found.calls
            assert tool == (choice.name or tool)
            assert SchemaValidator.of(held.schemas[tool]).find_fault(arguments) is None, (name, text)
