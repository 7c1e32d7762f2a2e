"""The calls of GLM: what ends a value, and what does not."""

from __future__ import annotations

import pytest

from actors.text.formats.table import AnswerFormat
from tests.actors.text.formats.reading import read

GLM = AnswerFormat("glm", "think")


def call(*values: tuple[str, str], tool: str = "write", end: str = "</tool_call>") -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values)
    return f"<tool_call>{tool}{pairs}{end}"


@pytest.mark.parametrize(
    "value",
    [
        "a</arg_value>b",
        "a</arg_value> <arg_key>b",
        "a</arg_value><arg_key>k</arg_key>",
        "a</tool_call>b",
        "<tool_call>write<arg_key>path</arg_key>",
        "<arg_key>other</arg_key><arg_value>",
        "<arg_key>content</arg_key><arg_value>",
        " \n kept \n ",
        "",
    ],
)
def test_markers_and_white_space_in_a_value_belong_to_it(value: str) -> None:
    pieces = read(GLM, f"Yes.\n{call(('content', value), ('path', 'p'))}\nDone.")
    assert [piece[0] for piece in pieces] == ["text", "write", "text"]
    assert pieces[1][1] == f'{{"content": {_json(value)}, "path": "p"}}'


def _json(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


def test_json_decides_where_a_list_ends() -> None:
    text = call(("items", '["</arg_value></tool_call>", {"a": 1}]'), ("note", "null"), tool="nest")
    assert read(GLM, text) == [("nest", '{"items": ["</arg_value></tool_call>", {"a": 1}], "note": null}')]


def test_types_come_from_the_schema() -> None:
    text = call(("n", "3"), ("x", "1e3"), ("on", "true"), ("any", "[1]"), ("other", "two"), tool="set")
    assert read(GLM, text) == [("set", '{"n": 3, "x": 1000.0, "on": true, "any": [1], "other": "two"}')]


def test_the_longest_name_of_a_tool_is_meant() -> None:
    assert read(GLM, "<tool_call>now.utc</tool_call><tool_call>now\n</tool_call>") == [("now.utc", "{}"), ("now", "{}")]


def test_a_last_value_may_lack_its_end() -> None:
    text = "<tool_call>write<arg_key>path</arg_key><arg_value>p</tool_call>"
    assert read(GLM, text) == [("write", '{"path": "p"}')]
    assert read(GLM, f"{text}\n{call(tool='now')}") == [("write", '{"path": "p"}'), ("now", "{}")]
    assert read(GLM, text, cut=True) == []
    assert read(GLM, f"{text} is a call.") == [("text", f"{text} is a call.")]


def test_a_value_may_end_with_the_next_key() -> None:
    text = "<tool_call>write<arg_key>path</arg_key><arg_value>p<arg_key>content</arg_key><arg_value>c</arg_value></tool_call>"
    assert read(GLM, text) == [("write", '{"path": "p", "content": "c"}')]


@pytest.mark.parametrize(
    "text", ["\n<tool_call>other</tool_call>", "\n\n<tool_call>write now", call(("path", "p"), end="")]
)
def test_what_is_no_call_remains_text(text: str) -> None:
    assert read(GLM, f"So: {text}") == [("text", f"So: {text}")]


def test_a_call_that_is_cut_off_is_left_out() -> None:
    whole = call(("path", "p"))
    for size in range(len("<tool_call>"), len(whole)):
        assert read(GLM, f"{call(tool='now')}\n{whole[:size]}", cut=True) == [("now", "{}")]
