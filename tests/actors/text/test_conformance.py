"""An answer under a schema is judged whole: as strict JSON, by the client's own schema, within a limit of work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from trio.testing import MockClock

from actors.kit.offload import Offload, T, run_inline
from actors.text.conformance import VISITS_MAX, Conformance, SchemaValidator, UnusableSchema, check_schema
from protocol.errors import AnswerInvalid, BadRequest, Overloaded


def find_fault(schema: str, text: str) -> str | None:
    return SchemaValidator.of(schema).find_fault(text)


NUMBERS = '{"type":"object","properties":{"a":{"type":"number"}},"required":["a"]}'


@pytest.mark.parametrize(
    "text", ['{"a":1}', ' {"a" : 1.5e3}\n', '{"a":-0.0,"b":[null,true]}', '{"a":1e999}', '{"a":"1","a":1}']
)
def test_a_text_that_validates_has_no_fault(text: str) -> None:
    assert find_fault(NUMBERS, text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ('{"a":1', "not JSON"),
        ('{"a":1} and more', "Extra data"),
        ('{"a":1}{"a":1}', "Extra data"),
        ('{"a":NaN}', "NaN"),
        ('{"a":-Infinity}', "Infinity"),
        ("{'a':1}", "not JSON"),
        ('{"a":1,}', "not JSON"),
        ('{"a":1,"a":"1"}', "does not validate"),
        ('{"a":1,"b":"\n"}', "not JSON"),
        ('{"a":1,"b":"\\ud800"}', "not Unicode"),
        (f'{{"a":{"9" * 5000}}}', "digits"),
        (f'{{"a":1e{"9" * 20}}}', "exponent"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"a":"1"}', "does not validate"),
        ("{}", "does not validate"),
        ("[]", "does not validate"),
    ],
)
def test_a_text_that_is_not_strict_json_of_the_schema_has_a_fault(text: str, reason: str) -> None:
    assert reason in (find_fault(NUMBERS, text) or "")


@pytest.mark.parametrize(
    ("format_name", "good", "bad"),
    [
        ("date-time", "2026-01-31T10:00:00Z", "2026-01-31T10:00:00"),
        ("date", "2026-01-31", "2026-02-31"),
        ("uuid", "01234567-89ab-cdef-0123-456789abcdef", "01234567"),
    ],
)
def test_formats_are_asserted(format_name: str, good: str, bad: str) -> None:
    schema = json.dumps({"type": "string", "format": format_name})
    assert find_fault(schema, json.dumps(good)) is None
    assert find_fault(schema, json.dumps(bad)) is not None


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    assert find_fault('{"type":"integer"}', "1.0") is None
    assert find_fault('{"type":"integer"}', "1.5") is not None
    assert find_fault('{"const":0.1}', "0.1") is None


def referring(levels: int) -> str:
    """Return a schema in which each level may be read in two ways, and so a text in two to the power of its depth."""
    rules: dict[str, object] = {f"e{level}": two_ways(f"e{level + 1}") for level in range(levels)}
    return json.dumps({"$ref": "#/$defs/e0", "$defs": rules | {f"e{levels}": {"type": "null"}}})


def two_ways(below: str) -> dict[str, object]:
    ways = ({"a": {"$ref": f"#/$defs/{below}"}, "z": {"items": {"const": number}}} for number in (1, 2))
    return {"oneOf": [{"type": "object", "properties": way} for way in ways]}


def nested(levels: int) -> str:
    text = "null"
    for _ in range(levels):
        text = f'{{"a":{text},"z":[2]}}'
    return text


def test_the_work_on_an_answer_has_a_limit() -> None:
    began = time.perf_counter()
    assert find_fault(referring(8), nested(8)) is None
    assert f"{VISITS_MAX:,} steps" in (find_fault(referring(60), nested(60)) or "")
    assert time.perf_counter() - began < 10, "it would take a thousand years without"


def test_a_large_pattern_is_left_to_the_engine() -> None:
    schema = json.dumps({"properties": {"a": {"pattern": r"^x(\\S{1,100} ){1,10}$"}, "b": {"pattern": "^[a-c]{1,9}$"}}})
    assert find_fault(schema, '{"a":"y","b":"abc"}') is None
    assert find_fault(schema, '{"b":"d"}') is not None


def test_many_patterns_are_compiled_in_little_time() -> None:
    """They took 36 s, and 3 GB."""
    patterns = {f"p{number}": {"pattern": rf"^x\p{{L}}{{1,60}}{number}$"} for number in range(1000)}
    began = time.process_time()
    check({"properties": patterns})
    assert time.process_time() - began < 5


def test_a_limit_of_work_is_for_each_answer() -> None:
    validator = SchemaValidator.of(referring(60))
    assert "steps" in (validator.find_fault(nested(60)) or "")
    assert validator.find_fault('{"z":[1]}') is None


def test_a_pattern_takes_linear_time() -> None:
    began = time.perf_counter()
    assert find_fault('{"type":"string","pattern":"^(a+)+$"}', json.dumps("a" * 50_000 + "!")) is not None
    assert time.perf_counter() - began < 10


def check(schema: object) -> None:
    text = json.dumps(schema)
    check_schema(text)
    SchemaValidator.of(text)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "thing"}, "/type"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"patternProperties": {"[": {"type": "null"}}}, "regex"),
        ({"properties": {"a": {"minLength": -1}}}, "/properties/a/minLength"),
        ({"$ref": "#/default", "default": {"$ref": "#/default"}}, "is a value"),
        ([], "boolean"),
    ],
)
def test_a_schema_that_cannot_judge_is_refused_with_its_place(schema: object, words: str) -> None:
    with pytest.raises(UnusableSchema) as refused:
        check(schema)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"$ref": {"const": {"$ref": "x"}}}, "required": ["$ref"]},
        {"$defs": {"default": {"type": "null"}}, "$ref": "#/$defs/default"},
        {"allOf": [{"type": "array"}], "$ref": "#/$defs/a", "$defs": {"a": {"items": {"type": "null"}}}},
        True,
    ],
)
def test_a_schema_with_unusual_names_can_judge(schema: object) -> None:
    check(schema)


def test_the_pattern_of_a_decimal_is_judged_without_its_look_ahead() -> None:
    schema = json.dumps({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"})
    assert find_fault(schema, '"-12.50"') is None
    assert [find_fault(schema, text) is None for text in ('""', '"-"', '"oak"')] == [False] * 3


@pytest.mark.parametrize(
    ("reference", "schema"),
    [
        (
            "#/properties/a/items/properties/y",
            {"properties": {"a": {"type": "array", "items": {"properties": {"y": {"type": "null"}}}}}},
        ),
        (
            "#/$defs/a/allOf/1",
            {"$defs": {"a": {"allOf": [{"type": "string"}, {"type": "null"}], "$ref": "#/$defs/b"}, "b": {}}},
        ),
        ("#/additionalProperties/anyOf/0", {"additionalProperties": {"anyOf": [{"type": "null"}, {}]}}),
    ],
)
def test_a_reference_may_lead_to_any_place(reference: str, schema: dict[str, object]) -> None:
    """The place was another one once visits are counted, or none."""
    properties = schema.setdefault("properties", {})
    assert isinstance(properties, dict)
    properties["b"] = {"$ref": reference}
    text = json.dumps({**schema, "type": "object", "required": ["b"]})
    check_schema(text)
    assert find_fault(text, '{"b":null}') is None
    assert find_fault(text, '{"b":1}') is not None


def test_siblings_of_a_reference_are_judged_with_it() -> None:
    schema = '{"$ref":"#/$defs/a","maximum":3,"allOf":[{"minimum":1}],"$defs":{"a":{"type":"integer"}}}'
    assert [find_fault(schema, text) is None for text in ("2", "4", "0", "2.5")] == [True, False, False, False]


PARAMS = {"grammar": "response_format"}


def conformance() -> Conformance:
    return Conformance(NUMBERS, Offload(run_inline, "").run, lambda name: PARAMS.get(name, name))


async def test_an_answer_waits_for_its_judgement_however_busy_the_threads_are(autojump_clock: MockClock) -> None:
    """It was lost with `overloaded`, after all of its tokens."""
    refused = 0

    async def busy(function: Callable[[], T], /, *, owner: str, size: int) -> T:
        nonlocal refused
        refused += 1
        if refused < 5:
            raise Overloaded("as many texts as may wait")
        return await run_inline(function, owner=owner, size=size)

    schema = '{"type":"string","pattern":"^a"}'
    await Conformance(schema, Offload(busy, "").run, str).judge('"ab"', None)
    assert refused == 5


async def test_an_answer_that_does_not_conform_is_the_servers_fault_and_its_stops_the_clients() -> None:
    await conformance().judge('{"a":1}', None)
    with pytest.raises(AnswerInvalid, match="response_format: it is JSON, but does not validate") as invalid:
        await conformance().judge("{}", None)
    assert (invalid.value.fault, invalid.value.retry_after_s) == ("server", None)
    with pytest.raises(BadRequest, match="stop ended the answer before"):
        await conformance().judge('{"a":', "1")
    with pytest.raises(BadRequest, match="stop_token_ids ended the answer before"):
        await conformance().judge('{"a":', 7)
