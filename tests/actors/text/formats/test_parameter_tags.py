"""Parameters as a grammar: in their order, strings as plain text where their type says so."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("xgrammar")  # it comes with an engine

from actors.text.formats.call_tags import TagPart, either, sequence, tag
from actors.text.formats.parameter_tags import HeldParameter, parameters_in_order
from protocol.schemas.parameters import parameters
from tests.rig.written_calls import ends


def pair(parameter: HeldParameter) -> TagPart:
    return sequence(parameter.name, either(*(tag("=", value.part, ";") for value in parameter.values(["!"]))))


def allows(schema: Any, text: str, *, plain: bool = True, separator: str = "") -> bool:
    kinds = [[HeldParameter(each, plain) for each in kind] for kind in parameters(json.dumps(schema), "<;")]
    whole = {"type": "structural_tag", "format": parameters_in_order(kinds, pair, separator)}
    return bool(ends(json.dumps(whole), text))


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"enum": ["x", 7]},
        "d": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("text", "plain", "json_"),
    [
        ("b=5;", True, True),
        ("", False, False),
        ("a=An oak;b=5;", True, False),
        ('a="An oak";b=5;', True, True),
        ("a=An! oak;b=5;", False, False),
        ("b=5;c=x;", True, False),
        ('b=5;c="x";', False, True),
        ("b=5;c=7;", True, True),
        ("b=5;d=12;", True, False),
        ("c=7;b=5;", False, False),
    ],
)
def test_parameters_stand_in_their_order_as_text_or_json(text: str, plain: bool, json_: bool) -> None:
    assert allows(SCHEMA, text) is plain
    assert allows(SCHEMA, text, plain=False) is json_


def test_parameters_of_any_name_stand_any_number_of_times() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2}
    assert [allows(schema, "x=1;" * count) for count in range(4)] == [False, True, True, False]
    assert not allows(schema, "x y=1;")


def test_the_kinds_of_objects_are_alternatives() -> None:
    branches = [{"properties": {name: {"const": name}}, "required": [name]} for name in ("a", "b")]
    schema = {"type": "object", "anyOf": branches}
    assert [allows(schema, text) for text in ("a=a;", "b=b;", "a=b;", "a=a;b=b;")] == [True, True, False, False]


LETTERS = "abcde"


@pytest.mark.parametrize("required", ["", "a", "c", "e", "bd", LETTERS])
def test_separators_stand_between_parameters_alone(required: str) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in LETTERS},
        "required": list(required),
    }
    for size in range(len(LETTERS) + 1):
        for names in combinations(LETTERS, size):
            text = "/".join(f"{name}=1;" for name in names)
            assert allows(schema, text, separator="/") is set(required).issubset(names), text
            assert not allows(schema, f"{text}/", separator="/")
            assert not allows(schema, f"/{text}", separator="/")
    assert not allows(schema, "b=1;/a=1;/c=1;/d=1;/e=1;", separator="/")


@pytest.mark.parametrize(
    ("bounds", "counts"),
    [
        ({}, [0, 1, 2, 3]),
        ({"maxProperties": 2}, [0, 1, 2]),
        ({"minProperties": 1}, [1, 2, 3]),
        ({"maxProperties": 0}, [0]),
    ],
)
def test_separators_stand_between_parameters_of_any_name(bounds: dict[str, int], counts: list[int]) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, **bounds}
    assert [count for count in range(4) if allows(schema, "/".join(["x=1;"] * count), separator="/")] == counts
    assert not allows(schema, "x=1;x=1;", separator="/")


def test_the_grammar_of_separated_parameters_is_not_as_long_as_the_square_of_their_number() -> None:
    def size(count: int) -> int:
        schema = {"type": "object", "properties": {f"p{number}": {} for number in range(count)}}
        kinds = [[HeldParameter(each, plain=False) for each in kind] for kind in parameters(json.dumps(schema), None)]
        return len(json.dumps(parameters_in_order(kinds, pair, "/")))

    assert size(64) < 8 * size(16)
