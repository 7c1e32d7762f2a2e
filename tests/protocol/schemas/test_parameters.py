"""The parameters of a schema apart from each other: their strings as plain text, their other values as JSON."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import pytest
from attrs import evolve

from protocol.schemas.parameters import ANY_NAME, NAMES_IN_TAGS, Parameter, ParameterNames, parameters
from protocol.schemas.refusals import Unenforceable


def of(schema: object) -> list[list[Parameter]]:
    return parameters(json.dumps(schema), "<")


def only(schema: object) -> Parameter:
    [[parameter]] = of({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    return parameter


def matches(parameter: Parameter, text: str) -> bool:
    assert parameter.strings is not None
    if parameter.strings == "any":
        return True
    written = (re.sub(r"\\u\{([0-9a-f]+)\}", lambda code: f"\\U{code[1]:0>8}", each) for each in parameter.strings)
    return any(re.fullmatch(each, text) for each in written)


@pytest.mark.parametrize(
    ("schema", "strings", "others"),
    [
        ({"type": "string"}, "any", None),
        ({"type": "integer", "minimum": 3}, None, {"type": "integer", "minimum": 3}),
        ({"type": ["string", "null"]}, "any", {"type": "null"}),
        ({"enum": ["x", "y.z", 1]}, ("x", "y\\.z"), {"enum": [1]}),
        ({}, "any", {}),
    ],
)
def test_strings_stand_apart_from_other_values(schema: Any, strings: object, others: object) -> None:
    parameter = only(schema)
    assert parameter.strings == strings
    assert (None if parameter.others is None else json.loads(parameter.others)) == others


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[A-Z]{2}$"}, ["AB"], ["A", "AB\n", "ab"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", 'a"b', "\n\n", "日本"], ["a", "abcd", "a<"]),
        ({"type": "string", "pattern": "^<b>$"}, ["<b>"], ["b"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, ["", "a[", "7"], ["[", " [", "a<"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["a7", "{"], ["7", "-7", "\n7"]),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, ["a{", "7"], ["{"]),
        ({"enum": ["5", "x", "-", "true", 1]}, ["x", "-", "true"], ["5"]),
        ({"enum": ["5", "True", "true", "t", False]}, ["5", "t"], ["True", "true"]),
        ({"enum": ["5", " 6", "null", None]}, ["5", " 6"], []),
        ({"anyOf": [{"type": "string"}, {"enum": [1]}]}, ["a7", ""], ["7", "-7", " 7"]),
        ({"anyOf": [{"type": "string"}, {"enum": [True]}]}, ["a", "7"], ["false", "False"]),
        (
            {"anyOf": [{"type": "string", "pattern": "^[0-9a-f]*$"}, {"type": "integer", "minimum": 9}]},
            ["", "a7", "f"],
            ["7", "7a"],
        ),
    ],
)
def test_a_string_as_plain_text_is_of_the_schema_and_no_json_of_another_kind(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    parameter = only(schema)
    assert [text for text in good if not matches(parameter, text)] == []
    assert [text for text in bad if matches(parameter, text)] == []


def test_parameters_keep_their_order_and_whether_they_are_required() -> None:
    [kind] = of({"type": "object", "properties": {"b": {}, "a": {}, "c": {}}, "required": ["a"]})
    assert [(each.name, each.required) for each in kind] == [("b", False), ("a", True), ("c", False)]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"minProperties": 2}, [("a", True), ("b", True), ("c", False)]),
        ({"maxProperties": 2}, [("a", True), ("b", False)]),
        ({"maxProperties": 1}, [("a", True)]),
    ],
)
def test_a_number_of_properties_is_kept_by_the_first_ones(bounds: dict[str, int], kept: list[tuple[str, bool]]) -> None:
    [kind] = of({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["a"], **bounds})
    assert [(each.name, each.required) for each in kind] == kept


def test_parameters_of_any_name_are_one_row() -> None:
    [[parameter]] = of({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1})
    assert (parameter.name, parameter.names, parameter.least, parameter.most) == (None, ANY_NAME, 1, None)
    [[parameter]] = of(
        {"type": "object", "patternProperties": {"^x[0-9]$": {}}, "additionalProperties": False, "maxProperties": 4}
    )
    assert (parameter.names, parameter.most) == ("x[0-9]", 4)


def test_each_kind_of_object_has_its_own_parameters() -> None:
    branches = [{"properties": {name: {"const": name}}, "required": [name]} for name in ("a", "b")]
    assert [[each.name for each in kind] for kind in of({"type": "object", "anyOf": branches})] == [["a"], ["b"]]
    listed = [[(each.name, each.required) for each in kind] for kind in of({"enum": [{"a": 1, "b": "x"}, {}, 5]})]
    assert listed == [[("a", True), ("b", True)], []]


def test_a_value_that_refers_to_others_has_their_definitions_alone() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "text": {"type": "string"}}}
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}, "i": {"type": "integer"}}}
    [[n, i]] = of(schema | {"$defs": {"node": node}})
    assert "$defs" in json.loads(n.whole)
    assert json.loads(i.whole) == {"type": "integer"}


def test_a_string_is_no_json_of_a_type_that_the_parser_reads_though_no_value_has_it() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["5", "x", "None", "[]", "["]}}}
    for read, kept in ((["string"], 5), (["string", "integer"], 4), (["string", "null", "array"], 3)):
        [[parameter]] = parameters(json.dumps(schema), "<", types_of=lambda _, read=read: frozenset(read))  # type: ignore[misc]
        assert isinstance(parameter.strings, tuple)
        assert len(parameter.strings) == kept


def test_a_parameter_whose_strings_all_read_as_other_values_is_left_out() -> None:
    digits = {"type": "object", "properties": {"a": {"enum": ["5"]}, "b": {"type": "integer"}}, "required": ["b"]}
    read = frozenset({"string", "integer"})
    [kind] = parameters(json.dumps(digits), "<", types_of=lambda _: read)
    assert [each.name for each in kind] == ["b"]
    [kind] = parameters(json.dumps(digits), None, types_of=lambda _: read)
    assert [each.name for each in kind] == ["a", "b"]
    both = {"anyOf": [{**digits, "required": ["a"]}, digits]}
    [kind] = parameters(json.dumps(both), "<", types_of=lambda _: read)
    assert [each.name for each in kind] == ["b"]
    with pytest.raises(Unenforceable, match=r'#: properties: "a": .* which read as other values'):
        parameters(json.dumps({**digits, "required": ["a"]}), "<", types_of=lambda _: read)


def test_names_that_the_model_cannot_write_are_refused() -> None:
    for name in ("a<b", "a>", 'a"', "a\nb", "a" * 257):
        with pytest.raises(Unenforceable, match=r'#: properties: .* a name with <, >, " or a line break'):
            of({"type": "object", "properties": {name: {}}, "required": [name]})
        with pytest.raises(Unenforceable, match='a name with <, >, " or a line break'):
            of({"enum": [{name: 1}]})
    with pytest.raises(Unenforceable, match=r'#: patternProperties: a name with <, >, " or a line break'):
        of({"type": "object", "patternProperties": {"^<[a-z]$": {}}, "additionalProperties": False})
    named = {"type": "object", "patternProperties": {"^(a|[<=>]x)$": {}}, "additionalProperties": False}
    [[parameter]] = of(named)
    assert parameter.names in {"a|=x", "(?:a|=x)"}


def test_a_character_that_a_format_escapes_is_left_out_of_expressions_alone() -> None:
    schema = {"type": "object", "properties": {"a&b": {}}, "additionalProperties": False}
    names = evolve(NAMES_IN_TAGS, escaped="&")
    [[parameter]] = parameters(json.dumps(schema), "<", names=names)
    assert parameter.name == "a&b"
    named = {"type": "object", "patternProperties": {"^[&a]$": {}}, "additionalProperties": False}
    [[parameter]] = parameters(json.dumps(named), "<", names=names)
    assert re.fullmatch(parameter.names, "a")
    assert not re.fullmatch(parameter.names, "&")


def test_no_string_is_left_out_where_values_are_typed() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["5", 5, 0.5, None]}, "b": {"type": ["string", "array"]}}}
    [[a, b]] = parameters(json.dumps(schema), "<", types_of=lambda _: frozenset({"integer"}), typed=True)
    assert (a.strings, sorted(a.types)) == (("5",), ["integer", "null", "number"])
    assert (b.strings, sorted(b.types)) == ("any", ["array"])


def test_a_schema_without_objects_is_refused() -> None:
    with pytest.raises(Unenforceable, match="it allows no object"):
        of({"enum": [5]})
    with pytest.raises(Unenforceable, match="#/properties/a: not: "):
        of({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]})


def test_all_parameters_together_are_bounded_and_let_others_work() -> None:
    nodes = {
        f"n{n}": {"type": "object", "properties": {f"q{i}": {"$ref": f"#/$defs/n{i}"} for i in range(40)}}
        for n in range(40)
    }
    schema = {"type": "object", "properties": {f"p{n}": {"$ref": f"#/$defs/n{n}"} for n in range(40)}, "$defs": nodes}
    paused = list[None]()
    with pytest.raises(Unenforceable, match="takes more than"):
        parameters(json.dumps(schema), "<", lambda: paused.append(None))
    assert paused


def test_values_that_many_kinds_of_objects_have_are_written_once_and_counted_each_time() -> None:
    names = [f"p{number}" for number in range(40)]
    text = {"type": "string", "maxLength": 4000, "pattern": "^[a-zé]{1,50}(x[a-c]{3,40}y)*$"}
    schema = {"type": "object", "properties": {name: {**text, "minLength": int(name[1:])} for name in names}}
    each = [{"required": [name]} for name in names]
    paused = list[None]()
    found = parameters(json.dumps({**schema, "anyOf": each[:2]}), "<", lambda: paused.append(None))
    assert [len(kind) for kind in found] == [40, 40]
    assert len(paused) == 39, "the first two have the same values"
    with pytest.raises(Unenforceable, match="takes more than"):
        parameters(json.dumps({**schema, "anyOf": each}), "<")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, ("true", "false", "null")),
        ({"type": "boolean"}, ("true", "false")),
        ({"type": ["string", "null"]}, ("null",)),
        ({"enum": [False, "true", 1]}, ("false",)),
        ({"type": "array"}, ()),
    ],
)
def test_the_words_of_json_among_the_values_are_known(schema: Any, words: tuple[str, ...]) -> None:
    assert only(schema).words == words


def test_the_values_of_a_format_without_plain_text_are_json_alone() -> None:
    [[parameter]] = parameters('{"type":"object","properties":{"a":{"enum":["x",1]}}}', None)
    assert (parameter.strings, parameter.others) == (None, None)
    assert json.loads(parameter.whole) == {"enum": ["x", 1]}


def test_names_are_those_of_a_format() -> None:
    names = ParameterNames("=", "no name", empty=False)

    def kinds(schema: object) -> list[list[Parameter]]:
        return parameters(json.dumps({"type": "object", **cast("Any", schema)}), None, names=names)

    assert kinds({"properties": {"a<b": {}}})[0][0].name == "a<b"
    for name in ("", "a=", "a" * 257):
        with pytest.raises(Unenforceable, match=r"#: properties: .*: no name"):
            kinds({"properties": {name: {}}})
    with pytest.raises(Unenforceable, match="#: patternProperties: no name"):
        kinds({"patternProperties": {"^=*$": {}}, "additionalProperties": False})
    [[parameter]] = kinds({"patternProperties": {"^[a=]{0,2}$": {}}, "additionalProperties": False})
    assert [re.fullmatch(parameter.names, name) is not None for name in ("", "a", "aa", "a=")] == [
        False,
        True,
        True,
        False,
    ]
