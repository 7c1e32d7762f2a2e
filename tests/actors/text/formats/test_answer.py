"""Answers of most formats: text, with reasoning between markers and calls behind them."""

from __future__ import annotations

from actors.text.formats.answer import Expected, ParserStage
from actors.text.formats.stage import TextPiece
from actors.text.formats.table import AnswerFormat, make_stage
from actors.text.formats.tool_table import ToolTable
from tests.rig.answers import TOOLS, read

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
F = ("call", "f", "{}")


def test_line_breaks_beside_markers_belong_to_neither_side() -> None:
    text = f"\n<think>\nHm.\n</think>\n\nB\n{CALL}\nC"
    assert read(text, "hermes", "think") == [("reasoning", "Hm."), ("text", "B"), F, ("text", "\nC")]


def test_a_marker_of_reasoning_behind_text_is_text() -> None:
    quoted = "The `<think>` tag opens a thought.\n\n<think>Hm.</think>B"
    for tools, thought in ((None, "think"), ("hermes", "think"), ("hermes", "qwen3"), ("llama3", "think")):
        assert read(quoted, tools, thought) == [("text", quoted)]
        assert read(f"<think>Hm.</think>\n{quoted}", tools, thought) == [("reasoning", "Hm."), ("text", quoted)]
        assert read(f"Hm.</think>{quoted}", tools, thought, thinking=True) == [("reasoning", "Hm."), ("text", quoted)]
    sentence = "A model writes 'Here is my thought process:' first."
    assert read(sentence, None, "granite") == [("text", sentence)]
    call = f"A {CALL} B <think>Hm.</think>"
    assert read(call, "hermes", "think") == [("text", "A "), F, ("text", " B <think>Hm.</think>")]


def test_reasoning_may_come_behind_a_call_or_behind_reasoning() -> None:
    thoughts = "<think>Hm.</think> \n<think> Or?</think>"
    assert read(f"A{CALL}\n{thoughts}B", "hermes", "think") == [
        ("text", "A"),
        F,
        ("reasoning", "Hm. Or?"),
        ("text", "B"),
    ]
    bare = '{"name": "f", "parameters": {}}'
    assert read(f"{bare}{thoughts}", "llama3", "think") == [F, ("reasoning", "Hm. Or?")]


def test_white_space_before_an_answer_remains() -> None:
    for text in (" \n", " \n<thin", " \nA\n", "\n\n"):
        for cut in (False, True):
            assert read(text, None, "think", cut=cut) == [("text", text)]
            assert read(text, "llama3", "think", cut=cut) == [("text", text)]


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
    stage = make_stage(AnswerFormat("hermes", None), Expected(TOOLS))
    assert isinstance(stage, ParserStage)
    assert (stage.watched, stage.held) == (frozenset("<\n"), 0)
    thinking = make_stage(AnswerFormat("hermes", "think"), Expected(TOOLS, thinking=True))
    assert thinking.watched is None


def test_a_stage_watches_for_reasoning_until_the_answer_begins() -> None:
    for tools, watched in ((TOOLS, frozenset("<\n")), (ToolTable(), frozenset[str]())):
        stage = make_stage(AnswerFormat("hermes", "think"), Expected(tools))
        before = stage.watched
        assert before is None
        assert (stage.feed("A"), stage.watched, stage.held) == ([TextPiece("A")], watched, 0)
