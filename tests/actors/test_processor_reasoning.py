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
from protocol.errors import AnswerInvalid, Unsupported
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import Reasoning, Rendering, Role, Text, Turn
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


NO_THINK = SWITCHED.replace(
    "enable_thinking is not defined or enable_thinking", "'/no_think' not in messages[-1].content"
)


@pytest.mark.parametrize("word", ["", " /no_think"])
async def test_a_word_in_the_conversation_turns_reasoning_off(word: str, autojump_clock: MockClock) -> None:
    learned = ConversationTemplate.learned(compile_template(NO_THINK, str), NO_THINK, {}, salt="1")
    line = '{"a": 3}' if word else 'Hm.\n</think>\n\n{"a": 3}'
    worker = Worker(line=line)
    async with running(worker, evolve(thinking_model(), template=learned), ROOM) as address:
        replies, _ = await ask(address, respond(f"n={len(ids(line))}{word}", grammar=SCHEMA))
    assert texts(replies, Text) == '{"a": 3}'
    parts = [part["type"] for part in elements(worker.asked[-1].sampling.grammar)]
    assert parts == (["optional", "json_schema"] if word else ["tag", "regex", "json_schema"])


@pytest.mark.parametrize(
    ("said", "thinks"), [("<think>", True), ("<think>\nHm, so", True), ("<think>Hm</think>", False)]
)
async def test_an_answer_may_go_on_within_its_reasoning(said: str, thinks: bool, autojump_clock: MockClock) -> None:
    line = 'Hm.\n</think>\n\n{"a": 3}' if thinks else '{"a": 3}'
    worker = Worker(line=line)
    rendering = Rendering(begins_answer=False, continues=True)
    turns = (Turn(Role.USER, f"n={len(ids(line))}"), Turn(Role.ASSISTANT, said))
    async with running(worker, thinking_model(), ROOM) as address:
        request = evolve(respond("x", grammar=SCHEMA, rendering=rendering), turns=turns)
        replies, _ = await ask(address, request)
    assert texts(replies, Text) == '{"a": 3}'
    assert (texts(replies, Reasoning) == "Hm.") is thinks
    assert (elements(worker.asked[-1].sampling.grammar)[0]["type"] == "tag") is thinks


K3 = SWITCHED.replace("<think>\n{% else %}", "<|open|>think<|sep|>{% else %}")


async def test_a_whole_format_has_a_thought_of_its_own_before_a_schema(autojump_clock: MockClock) -> None:
    learned = ConversationTemplate.learned(compile_template(K3, str), K3, {}, salt="1")
    line = 'Hm.<|close|>think<|sep|><|open|>response<|sep|>{"a": 3}<|close|>response<|sep|>'
    worker = Worker(line=line)
    model = evolve(TINY, template=learned, answers=AnswerFormat("kimi-k3"))
    async with running(worker, model, ROOM) as address:
        replies, _ = await ask(address, respond(f"n={len(ids(line))}", grammar=SCHEMA))
    assert (texts(replies, Reasoning), texts(replies, Text)) == ("Hm.", '{"a": 3}')
    assert [part["type"] for part in elements(worker.asked[-1].sampling.grammar)] == ["tag", "sequence"]


async def test_an_engine_without_structural_tags_holds_no_whole_format(autojump_clock: MockClock) -> None:
    limits = evolve(ROOM, info=evolve(ROOM.info, grammars=(GrammarKind.JSON_SCHEMA,)))
    async with running(Worker(), evolve(TINY, answers=AnswerFormat("gpt-oss")), limits) as address:
        with pytest.raises(Unsupported, match="cannot hold answers in the format gpt-oss"):
            await ask(address, respond("n=3", grammar=SCHEMA))
