"""Calls of Kimi K2."""

from __future__ import annotations

from tests.rig.answers import Part, read

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
F = ("call", "f", '{"a": "x"}')
FIRST = f"{CALL}functions.f:0{ARGUMENTS}{F[2]}{CALL_END}"


def kimi(text: str, *, cut: bool = False) -> list[Part]:
    return [*read(text, "kimi-k2", "think", cut=cut)]


def test_a_section_has_several_calls_and_text_around_it() -> None:
    text = f"Before. {SECTION}{FIRST}{CALL}functions.g:12 {ARGUMENTS}{{}} {CALL_END}{SECTION_END} After."
    assert kimi(text) == [("text", "Before. "), F, ("call", "g", "{}"), ("text", " After.")]


def test_an_id_may_lack_its_prefix_or_its_number_and_a_call_its_section() -> None:
    assert kimi(f"{CALL}f:0{ARGUMENTS}{F[2]}{CALL_END}") == [F]
    assert kimi(f"{CALL}functions.f{ARGUMENTS}{F[2]}") == [F]


def test_noise_before_the_first_call_and_an_empty_section_are_left_out() -> None:
    assert kimi(f"{SECTION} noise {FIRST}{SECTION_END}") == [F]
    assert kimi(f"Oak.{SECTION}{SECTION_END}") == [("text", "Oak.")]


def test_a_section_that_never_has_a_call_is_text() -> None:
    quoted = f"The marker {SECTION} begins a section, {SECTION_END} ends it."
    for cut in (False, True):
        assert kimi(quoted, cut=cut) == [("text", quoted)]
    assert kimi(f"{SECTION} An oak.") == [("text", f"{SECTION} An oak.")]


def test_an_end_marker_in_arguments_ends_no_call() -> None:
    arguments = f'{{"a": "{CALL_END}{SECTION_END}"}}'
    assert kimi(f"{SECTION}{CALL}f:0{ARGUMENTS}{arguments}{CALL_END}{SECTION_END}") == [("call", "f", arguments)]


def test_a_call_of_another_tool_is_text_and_the_next_one_a_call() -> None:
    wrong = f"{CALL}functions.h:0{ARGUMENTS}{{}}{CALL_END}"
    assert kimi(f"{SECTION}{wrong}{FIRST}") == [("text", f"{SECTION}{wrong}"), F]


def test_a_second_call_that_was_cut_off_is_left_out() -> None:
    assert kimi(f"{SECTION}{FIRST}{CALL}functions.g:1{ARGUMENTS}", cut=True) == [F]
