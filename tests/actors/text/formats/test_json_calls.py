"""Calls as JSON objects, and the parts of calls in JSON."""

from __future__ import annotations

import pytest

from actors.text.formats.json_calls import call_of, json_object, members_of, tool_name
from actors.text.formats.source import NoCall
from actors.text.formats.tool_table import ToolTable
from tests.actors.text.formats.test_source import finished, rest, source_of

TOOLS = ToolTable({"f": {}, "f_2": {}, "functions.g": {}})


def test_a_call_has_its_arguments_as_the_model_wrote_them() -> None:
    for arguments in ("{}", '{ "a":1,\n "b": {} }', '{"a": 1e999}', f'{{"a": {"1" * 5000}}}', '{"a": "\\ud800"}'):
        assert call_of(f'{{"x": [1], "arguments": {arguments} , "name" : "f"}}', TOOLS) == ("f", arguments)


def test_a_call_without_arguments_has_none_unless_they_are_required() -> None:
    assert call_of('{"name": "f"}', TOOLS) == ("f", "{}")
    with pytest.raises(NoCall):
        call_of('{"name": "f"}', TOOLS, required=True)
    both = '{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}'
    assert call_of(both, TOOLS, arguments=("parameters", "arguments")) == ("f", '{"b": 2}')


def test_other_json_is_no_call() -> None:
    for text in ("[]", "1", "{}", '{"name": "h"}', '{"name": 1}', '{"name": null}', '{"name": "f", "arguments": []}'):
        with pytest.raises(NoCall):
            call_of(text, TOOLS)


def test_the_last_member_with_a_key_counts() -> None:
    assert members_of('{"a": 1, "\\u0061": [2] }') == {"a": "[2]"}


def test_the_longest_name_of_a_tool_counts_with_or_without_its_prefix() -> None:
    for text, name, behind in (
        ("f_2:", "f_2", ":"),
        ("f_3", "f", "_3"),
        ("functions.f:", "f", ":"),
        ("functions.g", "functions.g", ""),
    ):
        source = source_of(text)
        assert finished(tool_name(source, TOOLS, "functions."), source) == name
        assert rest(source) == behind
    source = source_of("h")
    with pytest.raises(NoCall):
        finished(tool_name(source, TOOLS), source)


def test_an_object_is_nothing_else() -> None:
    source = source_of(' {"a": [1]}x')
    assert finished(json_object(source), source) == '{"a": [1]}'
    source = source_of("[1]")
    with pytest.raises(NoCall):
        finished(json_object(source), source)
