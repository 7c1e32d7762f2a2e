"""Calls of Mistral's models."""

from __future__ import annotations

from tests.rig.answers import Part, read

F = ("call", "f", '{"a": "x"}')
G = ("call", "g", "{}")


def mistral(text: str, *, cut: bool = False) -> list[Part]:
    return [*read(text, "mistral", "mistral", cut=cut)]


def test_a_list_has_several_calls() -> None:
    first = '{"arguments": {"a": "x"}, "name": "f"}'
    for text in (f'[TOOL_CALLS] [{first}, {{"name": "g"}}]', f'[TOOL_CALLS][{first},{{"name": "g"}}]'):
        assert mistral(text) == [F, G]


def test_a_name_and_an_object_are_a_call() -> None:
    text = 'Hi[TOOL_CALLS]f[ARGS]{"a": "x"}[TOOL_CALLS]g[CALL_ID]a1B2[ARGS]{}'
    assert mistral(text) == [("text", "Hi"), F, G]
    assert mistral('[TOOL_CALLS]f{"a": "x"}') == [F]


def test_markers_in_reasoning_and_in_arguments_are_part_of_them() -> None:
    arguments = '{"a": "[TOOL_CALLS]g[ARGS]{}[/THINK]"}'
    text = f"[THINK][TOOL_CALLS]g[ARGS]{{}}[/THINK][TOOL_CALLS]f[ARGS]{arguments}"
    assert mistral(text) == [("reasoning", "[TOOL_CALLS]g[ARGS]{}"), ("call", "f", arguments)]


def test_a_list_may_name_arguments_otherwise() -> None:
    assert mistral('[TOOL_CALLS] [{"name": "f", "parameters": {"a": "x"}, "id": "a1B2"}]') == [F]


def test_malformed_calls_remain_text() -> None:
    for text in ('[TOOL_CALLS] [{"name": "f", "args": {"a": "x"}}]', '[TOOL_CALLS] [{"name": "f", "x": 1}]'):
        assert mistral(text) == [("text", text)]
    for text in ("[TOOL_CALLS] no json", "[TOOL_CALLS]h[ARGS]{}", "[TOOL_CALLS]f[ARGS][]", "[TOOL_CALLS] []"):
        assert mistral(text) == [("text", text)]


def test_what_was_cut_off_is_left_out_and_whole_calls_of_a_list_remain() -> None:
    assert mistral("Hi[TOOL_CALLS]", cut=True) == [("text", "Hi")]
    assert mistral('[TOOL_CALLS] [{"name": "g"}, {"name": "f", "arg', cut=True) == [G]
