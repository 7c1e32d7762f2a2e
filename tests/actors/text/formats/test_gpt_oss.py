"""Answers of gpt-oss models."""

from __future__ import annotations

from actors.text.formats.tool_table import ToolTable
from tests.rig.answers import TOOLS, Part, read

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
F = ("call", "f", '{"a": "x"}')


def harmony(text: str, *, cut: bool = False, thinking: bool = False, offered: ToolTable = TOOLS) -> list[Part]:
    return [*read(text, "gpt-oss", cut=cut, thinking=thinking, offered=offered)]


def test_channels_are_reasoning_and_the_answer() -> None:
    text = f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look. {NEXT}{FINAL}An oak.\n<|return|>"
    assert harmony(text) == [("reasoning", "Hm."), ("text", "I look. An oak.\n")]
    assert harmony(f"Hm.{NEXT}{FINAL}Oak.", thinking=True) == [("reasoning", "Hm."), ("text", "Oak.")]


def test_a_message_to_a_function_is_a_call_however_its_header_is_written() -> None:
    for header in (
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        "<|channel|>analysis to=functions.f",
        "<|start|>assistant to=f<|channel|>commentary",
    ):
        assert harmony(f"{header}<|message|>{F[2]}") == [F]
        assert harmony(f"{ANALYSIS}Hm.{NEXT}{header.removeprefix('<|start|>assistant')}<|message|>{F[2]}<|call|>") == [
            ("reasoning", "Hm."),
            F,
        ]


def test_messages_follow_a_call() -> None:
    call = f"<|channel|>commentary to=functions.f<|message|>{F[2]}<|call|><|start|>assistant"
    assert harmony(f"{call}{call}{FINAL}Done") == [F, F, ("text", "Done")]


def test_markers_in_arguments_and_mentioned_in_reasoning_end_nothing() -> None:
    arguments = '{"a": "<|call|><|end|><|start|>assistant"}'
    text = f"{ANALYSIS}I write <|call|> or <|channel|>final.{NEXT} to=functions.f<|channel|>commentary<|message|>{arguments}"
    assert harmony(text) == [("reasoning", "I write <|call|> or <|channel|>final."), ("call", "f", arguments)]


def test_a_message_to_another_tool_is_left_out_and_one_to_another_function_is_text() -> None:
    assert harmony(f'<|channel|>commentary to=python<|message|>print("oak"){NEXT}{FINAL}Oak.') == [("text", "Oak.")]
    text = "<|channel|>commentary to=functions.h<|message|>{}"
    assert harmony(text) == [("text", text)]
    text = "<|channel|>commentary to=functions.f<|message|>{}"
    assert harmony(text, offered=ToolTable()) == [("text", text)]


def test_a_malformed_header_is_text_and_the_next_message_is_read() -> None:
    for header in ("<|channel|>??", "<|channel|>final " + "x" * 600 + "<|message|>"):
        text = f"{header}{NEXT}{ANALYSIS}Hm."
        assert harmony(text) == [("text", f"{header}<|end|>"), ("reasoning", "Hm.")]
    assert harmony(f"<|channel|>commentary to=assistant{ANALYSIS}Hm.") == [("reasoning", "Hm.")]


def test_text_without_any_header_is_the_answer() -> None:
    assert harmony("An oak.") == [("text", "An oak.")]


def test_a_message_may_begin_without_the_end_of_the_last_one() -> None:
    assert harmony(f"{ANALYSIS}Hm.<|start|>assistant{FINAL}Oak.") == [("reasoning", "Hm."), ("text", "Oak.")]


def test_a_header_and_a_call_that_were_cut_off_are_left_out() -> None:
    for rest in ("", "<|channel|>comm", " to=functions.f<|channel|>commentary<|message|>", f" to=functions.f{FINAL}{{"):
        assert harmony(f"{ANALYSIS}Hm.{NEXT}{rest}", cut=True) == [("reasoning", "Hm.")]
