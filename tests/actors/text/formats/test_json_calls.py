"""Calls as JSON objects, and the parts of calls in JSON."""

from __future__ import annotations

import pytest

from actors.text.formats.json_calls import ARGUMENTS, call_object, json_object, tool_name
from actors.text.formats.source import NoCall
from actors.text.formats.tool_table import ToolTable
from tests.actors.text.formats.test_source import finished, rest, source_of

TOOLS = ToolTable({"f": {}, "f_2": {}, "functions.g": {}})


def call(text: str, *, arguments: tuple[str, ...] = ARGUMENTS, required: bool = False) -> tuple[str, str]:
    source = source_of(text)
    return finished(call_object(source, TOOLS, arguments=arguments, required=required), source)


def test_a_call_has_its_arguments_as_the_model_wrote_them() -> None:
    for arguments in ("{}", '{ "a":1,\n "b": {} }', '{"a": 1e999}', f'{{"a": {"1" * 5000}}}', '{"a": "\\ud800"}'):
        assert call(f' {{"type": [1], "arguments": {arguments} , "n\\u0061me" : "f"}}') == ("f", arguments)
        assert call(f'{{"name":"f_2","parameters":{arguments},"id":1}}') == ("f_2", arguments)


def test_a_call_without_arguments_has_none_unless_they_are_required() -> None:
    assert call('{"name": "f"}') == ("f", "{}")
    with pytest.raises(NoCall):
        call('{"name": "f"}', required=True)
    both = '{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}'
    assert call(both) == ("f", '{"a": 1}')
    assert call(both, arguments=("parameters", "arguments")) == ("f", '{"b": 2}')


def test_arguments_may_be_null_or_an_object_in_a_string() -> None:
    assert call('{"name": "f", "arguments": null}', required=True) == ("f", "{}")
    assert call('{"name": "f", "arguments": "{\\"a\\": [1, \\"\\\\ud800\\"]}"}') == ("f", '{"a": [1, "\\ud800"]}')
    for text in ('"x"', '"[1]"', '"null"', '"{"', '"\\"{}\\""', "[]", "1", "true"):
        with pytest.raises(NoCall):
            call(f'{{"name": "f", "arguments": {text}}}')


def test_other_json_is_no_call() -> None:
    for text in ("[]", "1", "{}", '{"name": "h"}', '{"name": 1}', '{"name": null}', '{"name": "f",}', '{"name": "f"'):
        with pytest.raises(NoCall):
            call(text)


def test_an_object_with_other_keys_is_no_call_from_the_first_one_on() -> None:
    for text in ('{"args": {"a": 1}, "name": "f"}', '{"x": 1, "name": "f", "arguments": {}}'):
        source = source_of(text)
        with pytest.raises(NoCall):
            finished(call_object(source, TOOLS), source)
        assert rest(source).startswith(":")


def test_the_last_member_with_a_key_counts() -> None:
    assert call('{"name": "f", "arguments": {"a": 1}, "n\\u0061me": "f_2", "arguments": {}}') == ("f_2", "{}")


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
