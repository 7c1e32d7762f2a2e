"""Reasoning beside grammars: an answer keeps to its grammar behind its reasoning, and is judged without it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.formats.table import AnswerFormat
from actors.text.model import TextModel
from protocol.errors import AnswerInvalid
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import Reasoning, Rendering, Text
from tests.actors.test_processor import LIMITS, ask, respond, running
from tests.rig.gateway import TINY, Worker, ids

SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
ROOM = evolve(LIMITS, total_max=500, prompt_max=500)
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
OFF = Rendering({"enable_thinking": False})


def thinking_model() -> TextModel:
    learned = ConversationTemplate.learned(compile_template(SWITCHED, str), SWITCHED, {}, salt="1")
    return evolve(TINY, template=learned, answers=AnswerFormat(None, "think"))


def texts(replies: list[Any], kind: type[Text | Reasoning]) -> str:
    return "".join(reply.text for reply in replies if isinstance(reply, kind))


def elements(grammar: Grammar | None) -> list[dict[str, Any]]:
    assert grammar is not None
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    parts: list[dict[str, Any]] = json.loads(grammar.text)["format"]["elements"]
    return parts


async def test_an_answer_begins_within_the_reasoning_that_its_prompt_begins(autojump_clock: MockClock) -> None:
    line = "Hm, an oak.\n</think>\n\nYes."
    async with running(Worker(line=line), thinking_model(), ROOM) as address:
        replies, answered = await ask(address, respond(f"n={len(ids(line))}"))
        plain, _ = await ask(address, respond(f"n={len(ids(line))}", rendering=OFF))
    assert (texts(replies, Reasoning), texts(replies, Text)) == ("Hm, an oak.", "Yes.")
    assert 0 < answered.usage.reasoning_tokens < answered.usage.completion_tokens
    assert (texts(plain, Reasoning), texts(plain, Text)) == ("", line)


async def test_reasoning_that_never_ends_is_no_answer(autojump_clock: MockClock) -> None:
    async with running(Worker(line="Hm, an oak."), thinking_model(), ROOM) as address:
        replies, answered = await ask(address, respond(f"n={len(ids('Hm, an oak.'))}"))
    assert (texts(replies, Reasoning), texts(replies, Text)) == ("Hm, an oak.", "")
    assert answered.usage.reasoning_tokens == answered.usage.completion_tokens


@pytest.mark.parametrize(("rendering", "kinds"), [(Rendering(), ["tag", "regex"]), (OFF, ["optional"])])
async def test_an_answer_keeps_to_a_schema_behind_its_reasoning(
    rendering: Rendering, kinds: list[str], autojump_clock: MockClock
) -> None:
    thought = "Hm.\n</think>\n\n" if rendering is not OFF else ""
    line = thought + '{"a": 3}'
    worker = Worker(line=line)
    async with running(worker, thinking_model(), ROOM) as address:
        request = respond(f"n={len(ids(line))}", grammar=SCHEMA, rendering=rendering)
        replies, _ = await ask(address, request)
        assert texts(replies, Text) == '{"a": 3}'
        parts = elements(worker.asked[-1].sampling.grammar)
        assert [part["type"] for part in parts] == [*kinds, "json_schema"]
        worker.line = thought + '{"b": 3}'
        with pytest.raises(AnswerInvalid):
            await ask(address, respond(f"n={len(ids(worker.line))}", grammar=SCHEMA, rendering=rendering))


async def test_a_structural_tag_of_a_client_is_its_own(autojump_clock: MockClock) -> None:
    own = Grammar(GrammarKind.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}')
    worker = Worker(line="x")
    async with running(worker, thinking_model(), ROOM) as address:
        await ask(address, respond("n=1", grammar=own))
    assert worker.asked[0].sampling.grammar == own
