"""Three hundred drawn strict tools on the real engine: every call that it writes validates, in every format."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest
import trio
from jsonschema import Draft202012Validator

from actors.engines.port import Engine
from actors.text.call_grammar import call_grammar
from actors.text.formats.table import AnswerFormat
from protocol.errors import BadRequest
from protocol.messages.generation import FinishReason
from protocol.messages.tools import Tool, ToolChoice
from tests.contracts.engine import complete, request
from tests.rig.drawn_tools import drawn_tools
from tests.rig.gateway import TINY
from tests.rig.written_calls import parsed
from tests.system.sglang.conftest import MakeEngine
from tests.system.sglang.test_calls import FORMATS, without_thought

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
log = logging.getLogger(__name__)

HELD, DRAWN = 300, 325  # some may be refused
TOKENS_MAX, WITHIN_S, AT_A_TIME = 200, 600.0, 16


async def outcome(engine: Engine, tool: Tool, name: str) -> str:
    """Return how the answer to one demanded call ended, `valid` if it is a call that validates."""
    answers = AnswerFormat(name)
    try:
        held = call_grammar([tool], ToolChoice(required=True), answers, parallel=False)
    except BadRequest as error:
        return f"refused: {error.detail.partition(': ')[2].split(': ')[1]}"
    assert held is not None
    grammar = without_thought(held.grammar)
    wanted = request(engine, TOKENS_MAX, temperature=1.0, grammar=grammar, ignore_eos=False)
    with trio.fail_after(WITHIN_S):
        tokens, finished = await complete(engine, wanted)
    text = TINY.tokenizer.decode(tokens, skip_special_tokens=True)
    if finished.reason is not FinishReason.STOP:
        return str(finished.reason)
    calls = parsed(text, answers, [tool]).calls
    schema = json.loads(tool.parameters)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    if len(calls) == 1 and calls[0][0] == tool.name and validator.is_valid(json.loads(calls[0][1])):
        return "valid"
    log.warning("%s: %s: %s: %s", name, tool.parameters, text, calls)
    return "broken"


async def test_every_call_of_drawn_strict_tools_validates(make_engine: MakeEngine) -> None:
    tools = drawn_tools(DRAWN)
    assert len(tools) == DRAWN
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in FORMATS}
    places = trio.CapacityLimiter(AT_A_TIME)

    async def ask(engine: Engine, tool: Tool, name: str) -> None:
        async with places:
            outcomes[name][await outcome(engine, tool, name)] += 1

    async with make_engine() as engine, trio.open_nursery() as nursery:
        for number, tool in enumerate(tools):
            nursery.start_soon(ask, engine, tool, FORMATS[number % len(FORMATS)])
    for name, counted in outcomes.items():
        log.info("%s: %s", name, dict(counted.most_common()))
    total = sum(outcomes.values(), Counter[str]())
    refused = sum(count for reason, count in total.items() if reason.startswith("refused"))
    log.info("%d tools, %d refused: %s", len(tools), refused, dict(total.most_common()))
    assert not total["broken"]
    assert len(tools) - refused >= HELD
    assert total["valid"] > HELD // 2
