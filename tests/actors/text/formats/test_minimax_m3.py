"""The calls of MiniMax M3: values within values, and what ends one."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.answer import Expected
from actors.text.formats.arguments import member_of
from actors.text.formats.stage import CallPiece
from actors.text.formats.table import AnswerFormat, make_stage
from actors.text.formats.tool_table import ToolTable
from tests.actors.text.formats.mixtures import M3
from tests.actors.text.formats.reading import read

FORMAT = AnswerFormat("minimax-m3", "minimax-m3")
BEGIN, END = f"{M3}<tool_call>\n", f"{M3}</tool_call>"


def element(name: str, value: str) -> str:
    return f"{M3}<{name}>{value}{M3}</{name}>"


def call(body: str, tool: str = "write") -> str:
    return f'{M3}<invoke name="{tool}">{body}{M3}</invoke>\n'


@pytest.mark.parametrize(
    "value", [f"a{M3}</content>b", f"a{M3}</content>\nb", f"{M3}</path>", f"a{M3}<path>", f"a{END}", " \n kept \n ", ""]
)
def test_markers_and_white_space_in_a_value_belong_to_it(value: str) -> None:
    text = f"{BEGIN}{call(element('content', value) + element('path', 'p'))}{call('', 'now')}{END}"
    calls = [("write", json.dumps({"content": value, "path": "p"})), ("now", "{}")]
    assert read(FORMAT, f"<mm:think>Hm.</mm:think>Yes.{text}") == [("reasoning", "Hm."), ("text", "Yes."), *calls]


def test_elements_are_lists_and_objects() -> None:
    items = element("item", element("a", "1") + element("b", element("item", "x"))) + element("item", "true")
    text = BEGIN + call(element("items", items) + element("note", "null"), "nest") + END
    assert read(FORMAT, text) == [("nest", '{"items": [{"a": 1, "b": ["x"]}, true], "note": null}')]
    text = BEGIN + call(element("items", "") + element("note", "3"), "nest") + END
    assert read(FORMAT, text) == [("nest", '{"items": [], "note": "3"}')]


def test_the_schema_of_a_member_may_be_a_reference() -> None:
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"items": {"type": "integer"}}]}}}
    assert member_of({"$ref": "#/$defs/A"}, root, "item") == {"type": "integer"}
    assert member_of({"properties": {"a": {"type": "null"}}}, root, "a") == {"type": "null"}
    assert member_of({"properties": [], "items": True, "allOf": {}}, root, "a") == {}


def test_a_member_of_alternatives_has_the_values_of_each() -> None:
    a, b = {"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"type": "null"}}}
    null = {"type": "null"}
    other: dict[str, object] = {"properties": {"y": {}}}
    both = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert member_of({"anyOf": [a, b]}, {}, "x") == both
    assert member_of({"oneOf": [a, other, null]}, {}, "x") == {"type": "string"}
    assert member_of({"anyOf": [a, {"type": "object"}]}, {}, "x") == {}
    assert member_of({"anyOf": [a, {"$ref": "#/$defs/any"}]}, {"$defs": {"any": True}}, "x") == {}
    assert member_of({"allOf": [other, {"$ref": "#/$defs/b"}], "anyOf": [a]}, {"$defs": {"b": b}}, "x") == {
        "type": "null"
    }
    many: dict[str, object] = {f"A{index}": {"anyOf": [{"$ref": f"#/$defs/A{index + 1}"}] * 50} for index in range(60)}
    assert member_of({"$ref": "#/$defs/A0"}, {"$defs": many}, "x") == {}


@pytest.mark.parametrize(
    "value",
    ["{}", f'["{M3}</items>{M3}<note>"]', f'[["{M3}</items>{M3}</invoke>"], {{"a": " {M3}<a> "}}]', '["\\u00e9 \\n"]'],
)
def test_a_value_may_be_json_with_any_markers_in_its_strings(value: str) -> None:
    text = BEGIN + call(element("items", f" {value}\n") + element("note", "x"), "nest") + END
    assert read(FORMAT, text) == [("nest", json.dumps({"items": json.loads(value), "note": "x"}, ensure_ascii=False))]
    text = BEGIN + call(element("any", value), "set") + END
    assert read(FORMAT, text) == [("set", json.dumps({"any": json.loads(value)}, ensure_ascii=False))]


def test_the_arguments_of_a_call_may_be_one_json_object() -> None:
    body = json.dumps({"a": f"{M3}</invoke>", "b": {"c": 1}})
    text = f"{BEGIN}{call(f' {body} ', 'now')}{call('{}', 'now')}{END}"
    assert read(FORMAT, text) == [("now", body), ("now", "{}")]
    for other in ('{"a": 1', '{"a": 1e999}', "[1]", '{"a": 1} x'):
        wrong = BEGIN + call(other, "now") + END
        assert read(FORMAT, wrong) == [("text", wrong)]
    for size in range(len(body)):
        assert read(FORMAT, f'{BEGIN}{M3}<invoke name="now">{body[:size]}', cut=True) == []


def test_a_string_keeps_its_white_space_where_it_might_be_a_list() -> None:
    tool = ToolTable({"f": {"properties": {"a": {"type": ["string", "array"]}}}})
    for value in ("  x\n", "[ 1", ""):
        stage = make_stage(FORMAT, Expected(tool))
        pieces = [*stage.feed(BEGIN + call(element("a", value), "f") + END), *stage.end()]
        assert pieces == [CallPiece(0, "f", json.dumps({"a": value}))]


@pytest.mark.parametrize("text", [f"{BEGIN}It is.", BEGIN + call("", "other") + END, BEGIN + call("x") + END])
def test_what_is_no_call_remains_text(text: str) -> None:
    assert read(FORMAT, f"So: {text}") == [("text", f"So: {text}")]


def test_a_call_that_is_cut_off_is_left_out() -> None:
    second = call(element("path", "p"))
    for size in range(len(second) - 1):
        assert read(FORMAT, f"{BEGIN}{call('', 'now')}{second[:size]}", cut=True) == [("now", "{}")]


def test_elements_have_a_bounded_depth() -> None:
    text = f'{BEGIN}{M3}<invoke name="now">' + f"{M3}<a>" * 100
    assert read(FORMAT, text) == [("text", text)]
