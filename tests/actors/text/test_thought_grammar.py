"""The grammar of an answer behind its reasoning, whose markers are those of its format."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.call_tags import text
from actors.text.formats.table import AnswerFormat
from actors.text.thought_grammar import grammar_behind_thought, has_marks, structural_tag, tag_part, text_answer
from protocol.messages.generation import Grammar, GrammarKind

SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
THOUGHT = "Is it {3}?"


def held(answers: AnswerFormat, *, thinking: bool = False, begun: bool = False) -> str:
    return grammar_behind_thought(SCHEMA, answers, thinking=thinking, begun=begun).text


@pytest.mark.parametrize("name", ["gpt-oss", "kimi-k3"])
def test_a_whole_format_has_marks_of_its_own(name: str) -> None:
    answers = AnswerFormat(name)
    assert has_marks(answers)
    texts = {held(answers, thinking=thinking) for thinking in (False, True)}
    assert len(texts) == 2
    assert all(json.loads(each)["type"] == "structural_tag" for each in texts)


def test_without_marks_a_grammar_is_left_as_it_is() -> None:
    assert not has_marks(AnswerFormat("hermes"))
    assert grammar_behind_thought(SCHEMA, AnswerFormat("hermes")) is SCHEMA
    own = structural_tag(text("x"))
    assert grammar_behind_thought(own, AnswerFormat("kimi-k3")) is own
    assert tag_part(own) is None
    assert text_answer(text("x"), AnswerFormat("hermes", "think"), begun=False) == text("x")


GPT_OSS_ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
K3_REST = f"{THOUGHT}<|close|>think<|sep|>"
RESPONSE, RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"


@pytest.mark.parametrize(
    ("name", "thinking", "before", "behind"),
    [
        ("gpt-oss", False, GPT_OSS_ANALYSIS + FINAL, ""),
        ("gpt-oss", False, "<|start|>assistant<|channel|>final <|constrain|>json<|message|>", ""),
        ("gpt-oss", True, f"{THOUGHT}<|end|><|start|>assistant{FINAL}", ""),
        ("kimi-k3", True, K3_REST + RESPONSE, RESPONSE_END + "<|close|>message<|sep|>"),
        ("kimi-k3", True, K3_REST, ""),
        ("kimi-k3", False, f"<|open|>think<|sep|>{K3_REST}{RESPONSE}", RESPONSE_END),
    ],
)
def test_what_real_models_write_is_allowed_and_read_as_the_text_alone(
    name: str, thinking: bool, before: str, behind: str
) -> None:
    pytest.importorskip("xgrammar")  # it comes with an engine
    from tests.rig.written_calls import ends, parsed

    answers = AnswerFormat(name)
    tag = held(answers, thinking=thinking)
    answer = f'{before}{{"a": 3}}{behind}'
    assert ends(tag, answer)
    assert ends(tag, f'{before}{{"b": 3}}{behind}') is None
    found = parsed(answer, answers, (), thinking=thinking)
    assert found.text == '{"a": 3}'
    assert found.reasoning in {"", THOUGHT}
    assert bool(found.reasoning) == (THOUGHT in before)


def test_a_final_message_has_its_header_unless_it_goes_on() -> None:
    pytest.importorskip("xgrammar")
    from tests.rig.written_calls import ends

    answers = AnswerFormat("gpt-oss")
    assert ends(held(answers), '{"a": 3}') is None
    assert ends(held(answers, begun=True), '{"a": 3}')
