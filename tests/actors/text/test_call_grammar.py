"""What the grammar of a request's tools demands, what it lets be free, and what it refuses by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from actors.kit.offload import turns
from actors.text import call_grammar as grammar_module
from actors.text.call_grammar import call_grammar, holds_calls, object_schema
from actors.text.formats.table import AnswerFormat
from protocol.errors import BadRequest, Unsupported
from protocol.messages.tools import AUTO, Tool, ToolChoice

HERMES = AnswerFormat("hermes")
REQUIRED = ToolChoice(required=True)
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = Tool("get_weather", parameters=json.dumps(CITY), param="tools[0].function.parameters")
STRICT = Tool("get_weather", parameters=json.dumps(CITY), strict=True, param="tools[0].function.parameters")
NOW = Tool("now")


def unenforceable(*, strict: bool) -> Tool:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    return Tool("odd", parameters=json.dumps(schema), strict=strict, param="tools[3].function.parameters")


def schemas_in(value: Any) -> list[dict[str, Any]]:
    """Return the schemas in a structural tag, in their order."""
    if isinstance(value, dict):
        own = [value["json_schema"]] if value.get("type") == "json_schema" else []
        return own + [each for part in value.values() for each in schemas_in(part)]
    return [each for part in value for each in schemas_in(part)] if isinstance(value, list) else []


@pytest.mark.parametrize(
    ("tools", "choice", "held"),
    [
        ([], REQUIRED, False),
        ([WEATHER], AUTO, False),
        ([WEATHER], ToolChoice(none=True), False),
        ([STRICT], ToolChoice(none=True), False),
        ([NOW, STRICT], AUTO, True),
        ([WEATHER], REQUIRED, True),
        ([WEATHER], ToolChoice(name="get_weather"), True),
    ],
)
def test_calls_are_held_where_they_are_demanded_or_strict(tools: list[Tool], choice: ToolChoice, held: bool) -> None:
    assert holds_calls(tools, choice) is held
    assert (call_grammar(tools, choice, HERMES, parallel=True) is not None) is held


def test_a_schema_is_written_anew_for_the_engine_and_kept_as_sent_for_the_judge() -> None:
    held = call_grammar([WEATHER], REQUIRED, HERMES, parallel=False)
    assert held is not None
    assert schemas_in(json.loads(held.grammar.text)) == [
        {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
        | {"additionalProperties": False}
    ]
    assert held.schemas == {"get_weather": json.dumps(CITY, separators=(",", ":"))}


def test_of_several_tools_the_grammar_has_the_named_one_alone() -> None:
    held = call_grammar([WEATHER, NOW], ToolChoice(name="now"), HERMES, parallel=True)
    assert held is not None
    assert "get_weather" not in held.grammar.text
    assert set(held.schemas) == {"now"}


def test_beside_strict_tools_the_others_take_any_object() -> None:
    held = call_grammar([NOW, STRICT], AUTO, HERMES, parallel=True)
    assert held is not None
    assert set(held.schemas) == {"get_weather"}
    assert {"type": "object", "additionalProperties": {}} in schemas_in(json.loads(held.grammar.text))
    assert not held.demanded


def test_a_schema_that_no_engine_keeps_is_refused_by_place_if_it_is_strict() -> None:
    with pytest.raises(BadRequest, match="#/properties/a: not: ") as raised:
        call_grammar([STRICT, unenforceable(strict=True)], AUTO, HERMES, parallel=True)
    assert raised.value.param == "tools[3].function.parameters"


def test_another_tool_with_such_a_schema_takes_any_object() -> None:
    held = call_grammar([WEATHER, unenforceable(strict=False)], REQUIRED, HERMES, parallel=True)
    assert held is not None
    assert set(held.schemas) == {"get_weather"}


@pytest.mark.parametrize("answers", [AnswerFormat(), AnswerFormat(reasoning="think")], ids=str)
@pytest.mark.parametrize(("choice", "words"), [(REQUIRED, "cannot be demanded"), (AUTO, "cannot be kept to")])
def test_a_format_without_a_grammar_is_refused(answers: AnswerFormat, choice: ToolChoice, words: str) -> None:
    with pytest.raises(Unsupported, match=f"{words}.*no format of calls"):
        call_grammar([STRICT], choice, answers, parallel=True)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("{}", {"type": "object"}),
        ("true", {"type": "object"}),
        ('{"type":["object","null"]}', {"type": "object"}),
        ('{"$ref":"#/$defs/a","$defs":{"a":{"type":"object"}}}', None),
    ],
)
def test_arguments_are_objects_whatever_a_schema_leaves_open(sent: str, kept: object) -> None:
    schema = json.loads(object_schema(Tool("f", parameters=sent)))
    assert schema == (kept or {**json.loads(sent), "type": "object"})


@pytest.mark.parametrize("sent", ["false", "[]", '"a"', '{"type":"string"}', '{"type":["null"]}'])
def test_a_schema_without_objects_is_refused(sent: str) -> None:
    tool = Tool("f", parameters=sent, strict=True, param="tools[0].parameters")
    with pytest.raises(BadRequest, match="schema of an object") as raised:
        call_grammar([tool], AUTO, HERMES, parallel=True)
    assert raised.value.param == "tools[0].parameters"


def test_definitions_and_references_are_kept() -> None:
    nested = {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}}
    held = call_grammar([Tool("f", parameters=json.dumps(nested), strict=True)], REQUIRED, HERMES, parallel=True)
    assert held is not None
    assert "$ref" in held.grammar.text


def linked(count: int) -> str:
    """Return a schema of as many parameters, each of which reaches as many definitions."""
    patterns = {f"p{number}": {"type": "string", "pattern": f"^[a-z{number}]{{1,9}}$"} for number in range(6)}
    nodes = {
        f"t{n}": {"properties": {**patterns, "next": {"$ref": f"#/$defs/t{(n + 1) % count}"}}} for n in range(count)
    }
    refs = {f"a{number}": {"$ref": f"#/$defs/t{number}"} for number in range(count)}
    return json.dumps(
        {"type": "object", "properties": refs, "$defs": {k: {"type": "object", **v} for k, v in nodes.items()}}
    )


def test_parameters_that_share_many_definitions_are_refused_as_too_large() -> None:
    tool = Tool("f", parameters=linked(60), strict=True, param="tools[0].function.parameters")
    with pytest.raises(BadRequest, match="takes more than") as raised:
        call_grammar([tool], AUTO, AnswerFormat("qwen3-coder"), parallel=True)
    assert raised.value.param == tool.param
    held = call_grammar([evolve(tool, strict=False)], REQUIRED, AnswerFormat("glm"), parallel=True)
    assert held is not None
    assert held.schemas == {}


def test_the_grammar_of_all_tools_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "CHARACTERS_MAX", 50_000)
    tools = [Tool(f"f{number}", parameters=linked(16), strict=True) for number in range(8)]
    with pytest.raises(BadRequest, match="the grammar of these tools is too large"):
        call_grammar(tools, AUTO, AnswerFormat("qwen3-coder"), parallel=True)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_the_work_lets_others_have_its_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "PARTS_A_TURN", 1)
    turns_given = list[None]()
    token = turns.set(lambda: turns_given.append(None))
    try:
        call_grammar([STRICT, NOW], AUTO, AnswerFormat(name), parallel=True)
    finally:
        turns.reset(token)
    assert len(turns_given) >= 2
