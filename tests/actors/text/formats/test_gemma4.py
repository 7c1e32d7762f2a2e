"""Calls of Gemma 4."""

from __future__ import annotations

import json

from actors.text.formats.json_text import LEVELS_MAX
from tests.rig.answers import Part, read

Q = '<|"|>'


def gemma(text: str, *, cut: bool = False) -> list[Part]:
    return [*read(text, "gemma4", "gemma", cut=cut)]


def arguments_of(text: str) -> object:
    ((kind, name, arguments),) = gemma(f"<|tool_call>call:f{text}<tool_call|>")
    assert (kind, name) == ("call", "f")
    return json.loads(arguments)


def test_arguments_become_json() -> None:
    assert arguments_of("{}") == {}
    assert arguments_of(f"{{a:{Q}x{Q},n:-3}}") == {"a": "x", "n": -3}
    text = f"{{a b: {{c:[1, [true,null], {{}}, []]}} , d:1.5e-05, {Q}e{Q}:false}}"
    assert arguments_of(text) == {"a b": {"c": [1, [True, None], {}, []]}, "d": 1.5e-05, "e": False}


def test_a_string_stands_as_it_is() -> None:
    for value in ('{"a": 1}', "a,b}\n\t\\ <tool_call|>", "", "<|"):
        assert arguments_of(f"{{a:{Q}{value}{Q}}}") == {"a": value}


def test_a_string_of_json_is_a_value_too() -> None:
    assert arguments_of('{a:"x\\n","b":1}') == {"a": "x\n", "b": 1}


def test_text_stands_around_calls_and_reasoning_before_them() -> None:
    text = "<|channel>thought\nHm.\n<channel|>A <|tool_call>call:g{}<tool_call|> b <|tool_call>call:g{} c"
    g = ("call", "g", "{}")
    assert gemma(text) == [("reasoning", "Hm."), ("text", "A "), g, ("text", " b "), g, ("text", " c")]


def test_malformed_calls_remain_text() -> None:
    deep = "[" * LEVELS_MAX
    for rest in ("h{}", "f no brace", "f{a}", "f{a:b}", "f{a:1 2}", "f{:1}", "f{a:01}", "f{,}", f"f{{a:{deep}"):
        text = f"<|tool_call>call:{rest}<tool_call|>"
        assert gemma(text) == [("text", text)]


def test_a_second_call_that_was_cut_off_is_left_out() -> None:
    text = f"<|tool_call>call:g{{}}<tool_call|><|tool_call>call:f{{a:{Q}x"
    assert gemma(text, cut=True) == [("call", "g", "{}")]
