"""Answers of most formats: text, with reasoning between markers and calls behind them."""

from __future__ import annotations

from actors.text.formats.answer import Expected, ParserStage
from actors.text.formats.stage import TextPiece
from actors.text.formats.table import AnswerFormat, make_stage
from tests.rig.answers import TOOLS, read

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
F = ("call", "f", "{}")


def test_line_breaks_beside_markers_belong_to_neither_side() -> None:
    text = f"A\n\n<think>\nHm.\n</think>\n\nB\n{CALL}\nC"
    assert read(text, "hermes", "think") == [("text", "A"), ("reasoning", "Hm."), ("text", "B"), F, ("text", "\nC")]


def test_an_answer_may_begin_within_reasoning_and_end_in_it() -> None:
    assert read("Hm.</think>B", None, "think", thinking=True) == [("reasoning", "Hm."), ("text", "B")]
    assert read("<think>\nHm.</think>B", None, "think", thinking=True) == [("reasoning", "Hm."), ("text", "B")]
    assert read("<think>Hm.</thin", None, "think") == [("reasoning", "Hm.</thin")]


def test_a_call_within_reasoning_is_part_of_it() -> None:
    assert read(f"<think>{CALL}</think>", "hermes", "think") == [("reasoning", CALL)]


def test_a_call_within_reasoning_that_it_can_end_ends_it() -> None:
    assert read(f"<think>Hm.\n{CALL}", "hermes", "qwen3") == [("reasoning", "Hm."), F]
    assert read("<think>Hm.\n<tool_call></think>", "hermes", "qwen3") == [("reasoning", "Hm.\n<tool_call>")]


def test_reasoning_may_have_several_markers() -> None:
    for begin, end in (("Here is my", "Here is my"), ("Here's my", "Here is my"), ("Here's my", "Here's my")):
        text = f"{begin} thought process:\nHm.\n{end} response: B"
        assert read(text, None, "granite") == [("reasoning", "Hm."), ("text", " B")]


def test_a_call_without_a_marker_may_come_behind_reasoning() -> None:
    text = '<think>Hm.</think>\n\n{"name": "f", "parameters": {}}'
    assert read(text, "llama3", "think") == [("reasoning", "Hm."), F]
    assert read(text.removeprefix("<think>"), "llama3", "think", thinking=True) == [("reasoning", "Hm."), F]


def test_text_that_is_no_call_is_passed_on_at_its_first_wrong_character() -> None:
    stage = make_stage(AnswerFormat("hermes", None), Expected(TOOLS))
    assert stage.feed('A <tool_call>{"name"') == [TextPiece("A ")]
    assert (stage.feed(" "), stage.held) == ([], len('<tool_call>{"name" '))
    assert (stage.feed("x"), stage.held) == ([TextPiece('<tool_call>{"name" x')], 0)


def test_a_stage_begins_with_the_markers_it_watches() -> None:
    stage = make_stage(AnswerFormat("hermes", "think"), Expected(TOOLS))
    assert isinstance(stage, ParserStage)
    assert (stage.watched, stage.held) == (frozenset("<\n"), 0)
    thinking = make_stage(AnswerFormat("hermes", "think"), Expected(TOOLS, thinking=True))
    assert thinking.watched is None
