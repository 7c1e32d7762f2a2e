"""The answers of Kimi K3: its elements, what ends a value, and calls that are cut off."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.table import AnswerFormat
from tests.actors.text.formats.reading import read

K3 = AnswerFormat("kimi-k3")
TOOLS, TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"


def call(*values: tuple[str, str, str], tool: str = "write") -> str:
    arguments = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in values
    )
    return f'<|open|>call tool="{tool}" index="1"<|sep|>{arguments}<|close|>call<|sep|>'


def test_each_element_is_a_part_of_the_answer() -> None:
    text = f"Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes. <|close|>response<|sep|>{TOOLS}{call(tool='now')}{TOOLS_END}"
    end = "<|close|>message<|sep|>"
    assert read(K3, text + end, thinking=True) == [("reasoning", "Hm."), ("text", "Yes. "), ("now", "{}")]
    assert read(K3, f"<|open|>think<|sep|>{text}{end}") == [("reasoning", "Hm."), ("text", "Yes. "), ("now", "{}")]
    assert read(K3, f"Hm.{TOOLS}{call(tool='now')}{TOOLS_END}", thinking=True) == [("reasoning", "Hm."), ("now", "{}")]


@pytest.mark.parametrize(
    "value",
    [
        "<|close|>argument<|sep|> ends",
        "<|close|>argument<|sep|><|close|>call<|sep|> ends",
        '<|close|>argument<|sep|><|open|>argument key="x',
        TOOLS_END,
        "<|close|>message<|sep|>",
        " \n kept \n ",
        "",
    ],
)
def test_markers_and_white_space_in_a_value_belong_to_it(value: str) -> None:
    text = f"{TOOLS}{call(('content', 'string', value), ('path', 'string', 'p'))}{call(tool='now')}{TOOLS_END}"
    assert read(K3, text) == [("write", json.dumps({"content": value, "path": "p"})), ("now", "{}")]


def test_the_tag_has_the_type_unless_the_schema_has_another() -> None:
    values = (
        ("n", "number", "3"),
        ("x", "number", "2.5"),
        ("any", "string", "3"),
        ("on", "string", "true"),
        ("y", "", "[1]"),
    )
    text = f"{TOOLS}{call(*values, tool='set')}{TOOLS_END}"
    assert read(K3, text) == [("set", '{"n": 3, "x": 2.5, "any": "3", "on": true, "y": [1]}')]
    text = f"{TOOLS}{call(('note', 'null', 'null'), ('a&amp;&quot;b', 'object', '{}'), tool='nest')}{TOOLS_END}"
    assert read(K3, text) == [("nest", '{"note": null, "a&\\"b": {}}')]


def test_a_key_may_have_as_many_characters_in_escaped_form() -> None:
    key = '"&' * 128
    written = key.replace("&", "&amp;").replace('"', "&quot;")
    assert read(K3, f"{TOOLS}{call((written, 'null', 'null'), tool='nest')}{TOOLS_END}") == [
        ("nest", json.dumps({key: None}))
    ]


def test_arguments_may_be_one_object() -> None:
    text = '<|open|>call tool="set" index="1"<|sep|><|open|>json type="object"<|sep|>{"n": 3}<|close|>json<|sep|>'
    assert read(K3, f"{TOOLS}{text}<|close|>call<|sep|>{TOOLS_END}") == [("set", '{"n": 3}')]
    for other in "[3]", '{"n": 1e999}', '{"n": 3':
        wrong = TOOLS + text.replace('{"n": 3}', other) + f"<|close|>call<|sep|>{TOOLS_END}"
        assert read(K3, wrong) == [("text", wrong)]


def test_what_is_no_call_remains_text() -> None:
    for text in f"{TOOLS}now", f"{TOOLS}{call(tool='other')}{TOOLS_END}":
        assert read(K3, f"So: {text}") == [("text", f"So: {text}")]


def test_a_call_that_is_cut_off_is_left_out() -> None:
    second = call(("path", "string", "p"))
    for size in range(len(second)):
        assert read(K3, f"{TOOLS}{call(tool='now')}{second[:size]}", cut=True) == [("now", "{}")]
