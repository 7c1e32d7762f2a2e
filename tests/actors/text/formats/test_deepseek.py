"""Calls of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from tests.rig.answers import Part, read

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
F = ("call", "f", '{"a": "x"}')


def v3(text: str, *, cut: bool = False, thinking: bool = False) -> list[Part]:
    return [*read(text, "deepseek-v3", "think", cut=cut, thinking=thinking)]


def v31(text: str, *, cut: bool = False) -> list[Part]:
    return [*read(text, "deepseek-v3.1", "think", cut=cut)]


def fenced(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def test_a_section_has_several_calls() -> None:
    text = f"I look.{CALLS}{fenced('f', F[2])}\n{fenced('g', '{}')}{CALLS_END}"
    assert v3(text) == [("text", "I look."), F, ("call", "g", "{}")]
    text = f"{CALLS}{CALL}f{SEPARATOR}{F[2]}{CALL_END}{CALL}g{SEPARATOR}{{}}{CALL_END}{CALLS_END}"
    assert v31(text) == [F, ("call", "g", "{}")]


def test_a_call_may_come_behind_the_thoughts_and_without_a_section_or_fences() -> None:
    text = f"Hm.</think>{CALL}function{SEPARATOR}f\n{F[2]}{CALL_END}"
    assert v3(text, thinking=True) == [("reasoning", "Hm."), F]


def test_markers_in_arguments_end_no_call() -> None:
    arguments = f'{{"a": "```{CALL_END}{CALLS_END}"}}'
    assert v3(f"{CALLS}{fenced('f', arguments)}{CALLS_END}!") == [("call", "f", arguments), ("text", "!")]


def test_the_list_of_tools_decides_where_a_name_ends() -> None:
    assert v31(f"{CALL}f_2{SEPARATOR}{{}}") == [("call", "f_2", "{}")]
    text = f"{CALL}f_3{SEPARATOR}{{}}"
    assert v31(text) == [("text", text)]


def test_malformed_calls_remain_text() -> None:
    for text in (
        f"{CALLS}{fenced('f', '{')}{CALLS_END}",
        f"{CALLS}function{SEPARATOR}f\n```json\n{{}}\n```{CALLS_END}",
    ):
        assert v3(text) == [("text", text)]


def test_a_second_call_that_was_cut_off_is_left_out_and_remains_in_an_answer_that_ended() -> None:
    text = f"{CALLS}{CALL}f{SEPARATOR}{F[2]}{CALL_END}{CALL}g{SEPARATOR}{{"
    assert v31(text, cut=True) == [F]
    assert v31(text) == [F, ("text", f"{CALL}g{SEPARATOR}{{")]
