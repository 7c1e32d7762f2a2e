"""Arguments by their schemas: types, references, and values that JSON or UTF-8 does not have."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.arguments import decoded, encoded, types_of, value_of
from actors.text.formats.tool_table import Schema, ToolTable
from protocol.messages.tools import Tool


def types(schema: Schema, **definitions: object) -> frozenset[str]:
    return types_of(ToolTable({"f": {"properties": {"a": schema}, "$defs": definitions}}), "f", "a")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        (
            {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "array"}, {"type": "null"}]}]},
            {"integer", "array", "null"},
        ),
        ({"anyOf": [{"type": "integer"}, {}]}, set()),
        ({"allOf": [{"title": "A"}, {"type": "object"}]}, {"object"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"type": 3, "anyOf": "x", "enum": {}}, set()),
    ],
)
def test_types_of_a_schema(schema: Schema, expected: set[str]) -> None:
    assert types(schema) == expected


def test_references_are_followed_once() -> None:
    assert types({"$ref": "#/$defs/Size"}, Size={"enum": ["s", "m"]}) == {"string"}
    assert types({"$ref": "#/$defs/x~1y~0"}, **{"x/y~": {"type": "array"}}) == {"array"}
    twice = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}
    assert types(twice, A={"type": "integer"}) == {"integer"}
    assert types({"$ref": "#/$defs/A"}, A=twice) == set()
    assert types({"$ref": "#/$defs/missing"}) == types({"$ref": "https://example.com"}) == set()
    many = {f"A{index}": {"anyOf": [{"$ref": f"#/$defs/A{index + 1}"}] * 50} for index in range(60)}
    assert types({"$ref": "#/$defs/A0"}, **many) == set()


def test_an_argument_is_looked_for_in_a_limited_number_of_schemas() -> None:
    def of(options: int) -> frozenset[str]:
        last = {"properties": {"x": {"type": "integer"}}}
        schema = {"anyOf": [*({"properties": {f"p{place}": {}}} for place in range(options)), last]}
        return types_of(ToolTable.of([Tool("f", None, json.dumps(schema))]), "f", "x")

    assert of(100) == {"integer"}
    assert of(50_000) == set()


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 3\n", {"string"}, " 3\n"),
        (" 3\n", {"integer"}, 3),
        ("3.0", {"integer"}, 3),
        ("3", {"number"}, 3),
        ("3.5", {"integer"}, 3.5),
        ("three", {"integer"}, "three"),
        ("True", {"boolean"}, True),
        ("None", {"string", "null"}, None),
        ("null", {"string", "null"}, None),
        ("3", {"string", "null"}, "3"),
        ('"x"', {"string", "null"}, '"x"'),
        ("true", {"integer", "string"}, "true"),
        ("True", set(), "True"),
        ("[1, true]", set(), [1, True]),
        ("NaN", set(), "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("[" * 100 + "]" * 100, {"array"}, "[" * 100 + "]" * 100),
        ("[" * 100_000, {"array"}, "[" * 100_000),
    ],
)
def test_value_of_a_text(text: str, types: set[str], expected: object) -> None:
    value = value_of(text, frozenset(types))
    assert value == expected
    assert type(value) is type(expected)


def test_every_value_that_is_decoded_is_encoded_again() -> None:
    assert encoded(decoded('{"a": ["é", 1e3, -0, null]}')) == '{"a": ["é", 1000.0, 0, null]}'
    lone = encoded(decoded('["\\ud83d", "日"]'))
    assert json.loads(lone.encode()) == ["\ud83d", "日"]
