import json
from typing import Any

import pytest

from protocol.dialects.formats import (
    JSON_BYTES_MAX,
    JSON_LEVELS_MAX,
    JsonObject,
    JsonObjectOrText,
    ResponseFormat,
    TextFormat,
)
from protocol.dialects.request_body import read
from protocol.errors import BadRequest, Unsupported
from protocol.strict.mistakes import Mistakes
from protocol.strict.structure import structure


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {'a"]}\\': value}
    return value


def refused(data: object, cls: type[Any], param: str | None, kind: type[BadRequest] = BadRequest) -> str:
    with pytest.raises(BadRequest) as raised:
        read(data, cls)
    assert (type(raised.value), raised.value.param) == (kind, param)
    return str(raised.value)


@pytest.mark.parametrize("cls", [JsonObject, JsonObjectOrText])
def test_json_objects_keep_their_order_and_values(cls: type[JsonObject]) -> None:
    value = {"b": [1, 2.5, None, True], "a": {"é": "\0"}, "huge": 10**30}
    text = read(value, cls).text
    assert json.loads(text) == value
    assert list(json.loads(text)) == ["b", "a", "huge"]


@pytest.mark.parametrize("cls", [JsonObject, JsonObjectOrText])
def test_the_limit_of_nesting_is_exact(cls: type[JsonObject]) -> None:
    read(deep(JSON_LEVELS_MAX), cls)
    sentence = refused(deep(JSON_LEVELS_MAX + 1), cls, None)
    assert sentence == f"must be nested at most {JSON_LEVELS_MAX} levels deep, is {JSON_LEVELS_MAX + 1}"
    refused(deep(100_000), cls, None)


def test_lists_count_as_nesting() -> None:
    value: Any = "x"
    for _ in range(JSON_LEVELS_MAX):
        value = [value]
    refused({"a": value}, JsonObject, None)
    read({"a": value[0]}, JsonObject)


@pytest.mark.parametrize("cls", [JsonObject, JsonObjectOrText])
def test_the_limit_of_length_is_exact(cls: type[JsonObject]) -> None:
    fine = {"a": "x" * (JSON_BYTES_MAX - len('{"a":""}'))}
    assert len(read(fine, cls).text) == JSON_BYTES_MAX
    refused({"a": fine["a"] + "x"}, cls, None)


def test_a_structural_tag_may_be_sent_as_a_string() -> None:
    assert read('{ "a" : [1] }', JsonObjectOrText).text == '{"a":[1]}'
    for text in ("", "null", "[]", "{", '{"a":NaN}', "[" * 100_000, '{"a":' * 100_000, "x" * (JSON_BYTES_MAX + 1)):
        refused(text, JsonObjectOrText, None)
    refused('{"a":1}', JsonObject, None)


def mistakes(cls: type[ResponseFormat] | type[TextFormat], **fields: object) -> list[str]:
    try:
        structure(fields, cls)
    except Mistakes as error:
        return [mistake.path for mistake in error.mistakes]
    return []


@pytest.mark.parametrize(
    ("cls", "fields", "paths"),
    [
        (ResponseFormat, {"type": "text"}, []),
        (ResponseFormat, {"type": "json_object"}, []),
        (ResponseFormat, {"type": "json_object", "json_schema": None}, []),
        (ResponseFormat, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, []),
        (ResponseFormat, {"type": "json_schema"}, ["json_schema"]),
        (ResponseFormat, {"type": "text", "json_schema": {"name": "x", "schema": {}}}, ["json_schema"]),
        (TextFormat, {"type": "text"}, []),
        (TextFormat, {"type": "json_schema", "name": "x", "schema": {}, "strict": False, "description": "d"}, []),
        (TextFormat, {"type": "json_schema"}, ["name", "schema"]),
        (TextFormat, {"type": "json_object", "strict": True, "schema": {}}, ["schema", "strict"]),
    ],
)
def test_a_schema_is_required_by_its_type_alone(
    cls: type[ResponseFormat] | type[TextFormat], fields: dict[str, Any], paths: list[str]
) -> None:
    assert mistakes(cls, **fields) == paths


@pytest.mark.parametrize(
    ("data", "param", "kind"),
    [
        ({}, "type", BadRequest),
        ({"type": "xml"}, "type", Unsupported),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema", BadRequest),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema.name", BadRequest),
        ({"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}}, "json_schema.name", BadRequest),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": []}}, "json_schema.schema", BadRequest),
    ],
)  # fmt: skip
def test_mistakes_in_a_format_name_their_field(data: dict[str, Any], param: str, kind: type[BadRequest]) -> None:
    refused(data, ResponseFormat, param, kind)
