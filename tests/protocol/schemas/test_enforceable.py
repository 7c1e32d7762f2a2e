"""The law of schemas: what is said otherwise, and what is refused by place and keyword."""

from __future__ import annotations

import json
import time

import pytest

from protocol.schemas.enforceable import Unenforceable, enforceable, enforceable_pattern

INTEGER: dict[str, object] = {"type": "integer"}
TEXT: dict[str, object] = {"type": "string"}


def written(schema: object) -> dict[str, object]:
    """Return the schema that an engine gets for a client's."""
    return dict(json.loads(enforceable(json.dumps(schema))))


def closed(required: str = "", **properties: object) -> dict[str, object]:
    """Return an object as an engine gets it; `required` has the first letters of the required properties."""
    needed = [name for name in properties if name in required]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def refusal(schema: object) -> Unenforceable:
    with pytest.raises(Unenforceable) as caught:
        enforceable(json.dumps(schema))
    return caught.value


def test_every_branch_of_all_of_holds() -> None:
    both = {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 7}]}
    assert written(both) == {"type": "integer", "minimum": 5, "maximum": 7}
    objects = {"allOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": TEXT}}]}
    assert written(objects) == closed("a", a=INTEGER, b=TEXT)


def test_keywords_beside_a_reference_hold() -> None:
    schema = {"$ref": "#/$defs/n", "maximum": 7, "$defs": {"n": {"type": "integer", "minimum": 5}}}
    assert written(schema) == {"type": "integer", "minimum": 5, "maximum": 7}


def test_keywords_beside_a_union_hold_in_each_branch() -> None:
    schema = {"anyOf": [INTEGER, TEXT, {"type": "null"}], "minimum": 3, "type": ["integer", "string"]}
    assert written(schema) == {"anyOf": [{"type": "integer", "minimum": 3}, TEXT]}


def test_required_names_are_declared() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]}
    assert written(schema) == closed("ab", a=INTEGER, b={})


@pytest.mark.parametrize(
    ("schema", "shape"),
    [
        ({"type": "object"}, {"type": "object", "additionalProperties": {}}),
        ({"type": "object", "minProperties": 1}, {"type": "object", "additionalProperties": {}, "minProperties": 1}),
        ({"type": "array", "minItems": 2}, {"type": "array", "items": {}, "minItems": 2}),
        ({"type": "object", "properties": {}}, closed()),
        ({"additionalProperties": False}, closed()),
        (True, {}),
        ({"title": "anything", "default": 1}, {}),
    ],
)
def test_a_container_without_a_shape_gets_one(schema: object, shape: object) -> None:
    assert written(schema) == shape


def test_properties_keep_the_order_in_which_they_are_written() -> None:
    base = {"properties": {"z": INTEGER, "y": INTEGER}}
    own = {"b": INTEGER, "y": {"minimum": 0}, "a": INTEGER}
    first = written({"type": "object", "allOf": [base], "properties": own})["properties"]
    last = written({"type": "object", "properties": own, "allOf": [base]})["properties"]
    assert isinstance(first, dict)
    assert isinstance(last, dict)
    assert (list(first), list(last)) == (["z", "y", "b", "a"], ["b", "y", "a", "z"])
    assert first["y"] == last["y"] == {"type": "integer", "minimum": 0}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": [1, 2.5, "a", None, 10], "type": ["integer", "string"], "maximum": 5}, [1, "a"]),
        ({"enum": ["aa", "b", 3], "pattern": "^a", "type": "string"}, ["aa"]),
        ({"const": {"a": 1}, "required": ["a"], "properties": {"a": INTEGER}}, [{"a": 1}]),
        ({"enum": [1, True, 1.0], "const": 1}, [1]),
        ({"enum": ["2024-02-30", "2024-02-28"], "format": "date"}, ["2024-02-28"]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 20, "multipleOf": 5}, [5, 10, 15, 20]),
    ],
)
def test_listed_values_are_judged_by_the_keywords_beside_them(schema: object, values: list[object]) -> None:
    assert written(schema) == {"enum": values}


def test_a_listed_fraction_is_written_exactly() -> None:
    only = {"type": "number", "minimum": 0.1, "maximum": 0.1}  # the backend writes 0.1 in an enum with 17 digits
    assert written({"enum": [0.1, 0.5, "a"]}) == {"anyOf": [{"enum": [0.5, "a"]}, only]}
    assert refusal({"enum": [{"a": 0.1}]}).keyword == "enum"


def test_a_recursive_schema_stays_recursive() -> None:
    schema = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#"}}, "required": ["v"]}
    assert written(schema)["properties"] == {"v": INTEGER, "next": {"$ref": "#/$defs/d0"}}


def test_branches_of_one_of_are_kept_apart_by_what_they_require() -> None:
    branches = [
        {"type": "object", "properties": {"kind": {"const": kind}, "x": INTEGER}, "required": ["x"]} for kind in "ab"
    ]
    kept = [closed("kindx", kind={"enum": [kind]}, x=INTEGER) for kind in "ab"]
    assert written({"oneOf": branches}) == {"anyOf": kept}
    assert refusal({"oneOf": [INTEGER, {"type": "number"}]}).keyword == "oneOf"
    assert written({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}) == {"enum": [1, 3]}


def test_a_dependency_becomes_its_two_cases() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}}
    assert written(schema) == {"anyOf": [closed(b=INTEGER), closed("ab", a=INTEGER, b=INTEGER)]}


def test_a_union_of_constants_is_one_list() -> None:
    assert written({"anyOf": [*({"const": number} for number in range(3000)), {"type": "null"}]}) == {
        "anyOf": [{"enum": list(range(3000))}, {"type": "null"}]
    }


def test_equal_parts_behind_references_are_written_once() -> None:
    objects = {f"o{i}": {"properties": {f"p{j}": {"$ref": f"#/$defs/o{j}"} for j in range(40)}} for i in range(40)}
    assert len(enforceable(json.dumps({"$ref": "#/$defs/o0", "$defs": objects}))) < 60_000


def test_a_pattern_is_kept_beside_a_format() -> None:
    assert written({"type": "string", "format": "email", "pattern": "^[a-c]+@d$"}) == {
        "type": "string",
        "pattern": "[a-c]+@d",
    }


def test_listed_names_of_a_map_become_its_properties() -> None:
    schema = {"type": "object", "additionalProperties": INTEGER, "propertyNames": {"enum": ["a", "b"]}}
    assert written(schema) == closed(a=INTEGER, b=INTEGER)


def test_bounds_of_fractions_are_included_ones_of_six_decimals() -> None:
    assert written({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}) == {
        "type": "number",
        "minimum": 1e-06,
        "maximum": 0.1,
    }


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"properties": {"a/b": {"type": "array", "uniqueItems": True}}}, "#/properties/a~1b", "uniqueItems"),
        ({"not": {"type": "null"}}, "#", "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "#", "if"),
        ({"type": "array", "contains": INTEGER}, "#", "contains"),
        ({"type": "string", "nullable": True}, "#", "nullable"),
        ({"type": "number", "multipleOf": 0.01}, "#", "multipleOf"),
        ({"type": "integer", "multipleOf": 3}, "#", "multipleOf"),
        ({"type": "object", "minProperties": 2}, "#", "minProperties"),
        ({"type": "string", "pattern": "(?=a)b"}, "#", "pattern"),
        ({"type": "string", "format": "regex"}, "#", "format"),
        ({"allOf": [{"pattern": "^a"}, {"type": "string", "pattern": "b$"}]}, "#/allOf/1", "pattern"),
        ({"$ref": "https://example.org/x"}, "#", "$ref"),
        ({"$ref": "#/$defs/none"}, "#", "$ref"),
        ({"items": {"$ref": "#here"}}, "#/items", "$ref"),
        ({"anyOf": [{"$ref": "#"}]}, "#", "$ref"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", "properties"),
        ({"properties": {"a": {"minimum": 3, "maximum": 2}}, "required": ["a"]}, "#/properties/a", "minimum"),
        ({"type": "string", "maxLength": 10**9}, "#", "maxLength"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "#", "$schema"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, "#", "exclusiveMinimum"),
        ({"type": "array", "items": [INTEGER]}, "#", "items"),
        ({"type": "text"}, "#", "type"),
        ({"properties": {"a": {"$id": "https://example.org"}}}, "#/properties/a", "$id"),
        ({"enum": [2**60]}, "#", "enum"),
        ({"type": "object", "unevaluatedProperties": False}, "#", "unevaluatedProperties"),
        ({"patternProperties": {"^a": INTEGER, "b$": TEXT}}, "#", "patternProperties"),
        (False, "#", "false"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_place_and_keyword(schema: object, pointer: str, keyword: str) -> None:
    error = refusal(schema)
    assert (error.pointer, error.keyword) == (pointer, keyword)
    assert str(error).startswith(f"{pointer}: {keyword}: ")


@pytest.mark.parametrize("keyword", ["title", "x-order", "discriminator", "then", "minContains", "additionalItems"])
def test_an_annotation_constrains_nothing(keyword: str) -> None:
    assert written({"type": "integer", keyword: {"a": 1}}) == INTEGER


def test_a_property_may_be_named_like_a_keyword() -> None:
    assert written({"type": "object", "properties": {"not": TEXT}})["properties"] == {"not": TEXT}


def test_a_schema_of_128_kib_and_100_levels_is_decided_in_bounded_work() -> None:
    deep: dict[str, object] = INTEGER
    for _ in range(49):
        deep = {"type": "array", "items": {"allOf": [deep, {"title": "x" * 500}]}}
    assert enforceable(json.dumps(deep)).count("array") == 49
    chain = {f"n{index}": {"$ref": f"#/$defs/n{index + 1}"} for index in range(3000)} | {"n3000": INTEGER}
    assert written({"$ref": "#/$defs/n0", "$defs": chain}) == INTEGER
    wide = {"allOf": [{"anyOf": [{"required": [f"{side}{index}"]} for side in "ab"]} for index in range(20)]}
    assert refusal({"type": "object", **wide}).keyword == "allOf"
    nested = "[" * 100_000
    with pytest.raises(Unenforceable, match=r"nested too deep|must be JSON"):
        enforceable(nested)


def test_a_chain_of_objects_of_any_length_is_decided() -> None:
    chain = {f"n{index}": {"properties": {"a": {"$ref": f"#/$defs/n{index + 1}"}}} for index in range(1500)}
    assert len(enforceable(json.dumps({"$ref": "#/$defs/n0", "$defs": chain | {"n1500": INTEGER}}))) > 1500


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", "(?!a)b", "(?<=a)b", r"\bword", r"(a)\1", "a^b", "a$b", "(?i)a", r"\p{L}"]
)
def test_one_rule_holds_for_regular_expressions_wherever_they_stand(pattern: str) -> None:
    with pytest.raises(Unenforceable) as caught:
        enforceable_pattern(pattern)
    assert caught.value.keyword == "regex"
    assert refusal({"type": "string", "pattern": pattern}).reason == caught.value.reason


@pytest.mark.parametrize(
    ("pattern", "kept"), [("(?:a|b)+", "(?:a|b)+"), ("[$^]", r"[$\^]"), ("^a+?$", "a+"), (r"\d{2}|^x", "[0-9]{2}|x")]
)
def test_a_regular_expression_is_for_whole_answers(pattern: str, kept: str) -> None:
    assert enforceable_pattern(pattern) == kept


def test_a_long_enumeration_takes_linear_time() -> None:
    """Each value was compared with each: 12,000 took half a minute of a processor."""
    values = [f"value {number}" for number in range(10_000)]
    began = time.process_time()
    assert json.loads(enforceable(json.dumps({"enum": values})))["enum"] == values
    assert time.process_time() - began < 5
