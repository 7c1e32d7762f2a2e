"""Parameters as a grammar: in their order, strings as plain text where their type says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("xgrammar")  # it comes with an engine

from actors.text.formats.call_tags import TagPart, either, sequence, tag
from actors.text.formats.parameter_tags import HeldParameter, parameters_in_order
from protocol.schemas.parameters import parameters
from tests.rig.written_calls import ends


def pair(parameter: HeldParameter) -> TagPart:
    return sequence(parameter.name, either(*(tag("=", value.part, ";") for value in parameter.values(["!"]))))


def allows(schema: Any, text: str, *, plain: bool = True) -> bool:
    kinds = [[HeldParameter(each, plain) for each in kind] for kind in parameters(json.dumps(schema), "<;")]
    whole = {"type": "structural_tag", "format": parameters_in_order(kinds, pair)}
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
