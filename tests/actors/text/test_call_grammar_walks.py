"""What the grammar backend lets a model write, our own parser reads as calls that validate."""

from __future__ import annotations

import json

import pytest
from canitoolcall.fixtures import Fixture

pytest.importorskip("xgrammar")  # it comes with an engine

from actors.text.call_grammar import HeldCalls, call_grammar
from actors.text.conformance import SchemaValidator
from actors.text.formats.answer import WholeFormat
from actors.text.formats.held_format import HeldFormat
from actors.text.formats.table import TOOLS, AnswerFormat
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.tools import AUTO, Tool, ToolChoice
from tests.rig.tool_referee import fixtures, format_of, offer_of
from tests.rig.written_calls import ends, has_to_end, object_of, parsed, walks

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 12},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "maxItems": 2}},
        },
        "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    },
    "required": ["city", "code"],
    "additionalProperties": False,
}
TOOLS_OFFERED = (Tool("get_weather", parameters=json.dumps(SCHEMA), strict=True), Tool("now", strict=True))
REQUIRED = ToolChoice(required=True)
FORMATS = {name: each for name, each in TOOLS.items() if isinstance(each, HeldFormat)}
EACH_FORMAT = pytest.mark.parametrize("name", FORMATS)
WALKS = 12


def held_by(name: str, choice: ToolChoice, *, parallel: bool = True, thinks: bool = False) -> HeldCalls:
    reasoning = "think" if thinks else None
    held = call_grammar(TOOLS_OFFERED, choice, AnswerFormat(name, reasoning), parallel=parallel, thinking=thinks)
    assert held is not None
    return held


def check_calls(held: HeldCalls, calls: list[tuple[str, str]]) -> None:
    for tool, arguments in calls:
        assert SchemaValidator.of(held.schemas[tool]).find_fault(arguments) is None, arguments


@EACH_FORMAT
@pytest.mark.parametrize("parallel", [False, True])
def test_a_demanded_answer_is_calls_that_validate(name: str, parallel: bool) -> None:
    held = held_by(name, REQUIRED, parallel=parallel)
    answers = walks(held, WALKS)
    assert len(answers) > WALKS // 4
    for text in answers:
        found = parsed(text, AnswerFormat(name), TOOLS_OFFERED)
        assert found.text == "", text
        assert len(found.calls) == 1 or (parallel and found.calls), text
        check_calls(held, found.calls)
        if not parallel:
            assert has_to_end(held.grammar.text, text), text


@pytest.mark.parametrize("name", [name for name in FORMATS if not isinstance(TOOLS[name], WholeFormat)])
def test_a_demanded_answer_may_end_a_thought_first(name: str) -> None:
    call = walks(held_by(name, REQUIRED, parallel=False), WALKS)[0]
    held = held_by(name, REQUIRED, parallel=False, thinks=True)
    text = f"Is it Rome?</think>\n\n{call}"
    assert ends(held.grammar.text, text)
    assert ends(held.grammar.text, call) is not True
    found = parsed(text, AnswerFormat(name, "think"), TOOLS_OFFERED, thinking=True)
    assert (found.text, found.reasoning, len(found.calls)) == ("", "Is it Rome?", 1)


@EACH_FORMAT
def test_with_strict_tools_an_answer_is_free_until_a_call_begins(name: str) -> None:
    call = walks(held_by(name, REQUIRED, parallel=False), WALKS)[0]
    # The end of a list of calls without a marker is the end of an answer.
    alone = FORMATS[name].frame.alone or bool(getattr(FORMATS[name], "bare", "") and FORMATS[name].frame.end)
    for parallel in (False, True):
        tag = held_by(name, AUTO, parallel=parallel).grammar.text
        assert ends(tag, "")
        assert ends(tag, "The oak is {old}, and 1 < 2.")
        assert ends(tag, call)
        assert ends(tag, call[: len(call) // 2]) is not True
        assert ends(tag, call.replace("get_weather", "get_whether").replace("now", "then")) is None
        assert has_to_end(tag, call) is (alone or not parallel)


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if getattr(each, "bare", "")])
@pytest.mark.parametrize("reasoning", [None, "think"])
def test_a_call_at_the_beginning_of_a_free_answer_is_held(name: str, reasoning: str | None) -> None:
    answers = AnswerFormat(name, reasoning)
    held = call_grammar(TOOLS_OFFERED, AUTO, answers, parallel=True)
    assert held is not None
    call = walks(held_by(name, ToolChoice(name="get_weather"), parallel=False), WALKS)[0]
    other = call.replace("Paris", "Pisa").replace("Rome", "Pisa")
    frame = FORMATS[name].frame
    thought = () if reasoning is None else ("<think>Yes.</think>\t",)
    for before in ("", "\t", "\r\n", " \t", frame.trigger, f"<b>{frame.trigger}", *thought):
        text = f"{before}{other}{frame.close if frame.trigger in before else ''}"
        assert parsed(text, answers, TOOLS_OFFERED).calls, text
        assert ends(held.grammar.text, text) is None, text
    assert ends(held.grammar.text, f"{frame.trigger}{call}{frame.close}")
    assert ends(held.grammar.text, "<b>An oak</b> [1] {2} < 3")


MIXED = {
    "type": "object",
    "properties": {
        "level": {"enum": ["5", "true", "high", 1]},
        "count": {"type": ["string", "integer"], "enum": ["7", "many"]},
        "flag": {"anyOf": [{"type": "string", "maxLength": 2}, {"enum": [True]}]},
        "code": {"anyOf": [{"type": "string", "pattern": "^[0-9a-f]{1,2}$"}, {"type": "integer", "minimum": 900}]},
        "choice": {"enum": ["1", "2", None]},
        "order": {"enum": ["", "up"]},
    },
    "required": ["level", "count", "flag", "code", "choice", "order"],
    "additionalProperties": False,
}


@EACH_FORMAT
def test_values_of_mixed_types_are_read_as_the_grammar_means_them(name: str) -> None:
    tool = Tool("set", parameters=json.dumps(MIXED), strict=True)
    held = call_grammar([tool], REQUIRED, AnswerFormat(name), parallel=False)
    assert held is not None
    answers = walks(held, WALKS)
    assert len(answers) > WALKS // 4
    for text in answers:
        found = parsed(text, AnswerFormat(name), [tool])
        assert len(found.calls) == 1, text
        check_calls(held, found.calls)


@EACH_FORMAT
def test_a_string_that_reads_as_another_value_is_left_out(name: str) -> None:
    schema = {"type": "object", "properties": {"five": {"enum": ["5", 5]}}, "required": ["five"]}
    tool = Tool("set", parameters=json.dumps(schema), strict=True)
    held = call_grammar([tool], REQUIRED, AnswerFormat(name), parallel=False)
    assert held is not None
    answers = walks(held, WALKS)
    assert len(answers) > WALKS // 4
    for text in answers:
        [(_, arguments)] = parsed(text, AnswerFormat(name), [tool]).calls
        assert object_of(arguments) in ({"five": "5"}, {"five": 5})


NAMED = {"patternProperties": {"^[a-z]{1,3}$": {"type": "integer", "maximum": 9}}, "additionalProperties": False}
OPEN = {**NAMED, "minProperties": 1, "maxProperties": 2}
KINDS = {
    "anyOf": [
        {"properties": {"x": {"type": "string", "pattern": "^[0-9]{1,2}$"}}, "required": ["x"]},
        {"$ref": "#/$defs/numbered"},
        {"type": "null"},
    ],
    "$defs": {"numbered": {"properties": {"x": {"type": "integer"}, "y": {"const": " 5"}}, "required": ["x", "y"]}},
}


@EACH_FORMAT
@pytest.mark.parametrize("schema", [OPEN, KINDS, {"anyOf": [*KINDS["anyOf"], OPEN], "$defs": KINDS["$defs"]}])
def test_the_names_and_kinds_of_arguments_may_be_open(name: str, schema: dict[str, object]) -> None:
    tool = Tool("set", parameters=json.dumps(schema), strict=True)
    held = call_grammar([tool], REQUIRED, AnswerFormat(name), parallel=False)
    assert held is not None
    answers = walks(held, WALKS)
    assert answers
    for text in answers:
        found = parsed(text, AnswerFormat(name), [tool])
        assert len(found.calls) == 1, text
        check_calls(held, found.calls)


TYPED = [name for name, each in FORMATS.items() if each.frame.typed]


@pytest.mark.parametrize("name", TYPED)
def test_a_value_behind_its_type_may_be_any_of_its_schema(name: str) -> None:
    kinds: dict[str, object] = {"maybe": {"type": ["string", "null"], "maxLength": 3}, "five": {"enum": ["5", 5]}}
    tool = Tool(
        "set", parameters=json.dumps({"type": "object", "properties": kinds, "required": [*kinds]}), strict=True
    )
    held = call_grammar([tool], REQUIRED, AnswerFormat(name), parallel=False)
    assert held is not None
    found = [json.loads(parsed(text, AnswerFormat(name), [tool]).calls[0][1]) for text in walks(held, 40)]
    for key in kinds:
        strings = {isinstance(each[key], str) for each in found}
        assert strings == {False, True}, key


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.frame.plain_without])
def test_a_string_of_a_tool_that_is_not_held_stands_as_it_is(name: str) -> None:
    properties = {"properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]}
    held, free = (
        Tool("get_weather", parameters=json.dumps({"type": "object", **properties}), strict=strict)
        for strict in (True, False)
    )
    grammar = call_grammar([held], ToolChoice(name="get_weather"), AnswerFormat(name), parallel=False)
    assert grammar is not None
    beside = call_grammar([free, Tool("now", strict=True)], AUTO, AnswerFormat(name), parallel=False)
    assert beside is not None
    texts = walks(grammar, WALKS)
    assert texts
    assert all(ends(beside.grammar.text, text) for text in texts)


@EACH_FORMAT
def test_the_empty_text_may_be_the_only_string(name: str) -> None:
    tool = Tool("set", parameters='{"type":"object","properties":{"a":{"const":""}},"required":["a"]}', strict=True)
    held = call_grammar([tool], REQUIRED, AnswerFormat(name), parallel=False)
    assert held is not None
    found = [parsed(text, AnswerFormat(name), [tool]).calls for text in walks(held, 4)]
    assert found
    assert [object_of(arguments) for [(_, arguments)] in found] == [{"a": ""}] * len(found)


KIMI_K3 = AnswerFormat("kimi-k3")
KIMI_K3_MARKED = "kimi/k3-control-marker-text-in-value"  # its string has a marker, which no held string has


def held_as_recorded(fixture: Fixture, choice: ToolChoice) -> str:
    offered = offer_of(fixture, KIMI_K3)
    tools = [Tool(name, parameters=json.dumps(each), strict=True) for name, each in offered.tools.schemas.items()]
    held = call_grammar(tools, choice, KIMI_K3, parallel=True, thinking=offered.thinking)
    assert held is not None
    return held.grammar.text


def test_what_kimi_k3_writes_is_allowed() -> None:
    rendered = [each for each in fixtures() if each.provenance.kind == "template_render"]
    recorded = [each for each in rendered if format_of(each) == KIMI_K3]
    assert len(recorded) > 10
    refused = [each.id for each in recorded if ends(held_as_recorded(each, AUTO), each.raw_output) is None]
    assert refused == [KIMI_K3_MARKED]
    called = [each for each in recorded if each.expected and each.expected.tool_calls and not each.expected.content]
    assert len(called) > 8
    for fixture in called:
        # An answer that has to be a call ends behind it.
        answer = fixture.raw_output.removesuffix("<|close|>message<|sep|>")
        assert ends(held_as_recorded(fixture, REQUIRED), answer) or fixture.id == KIMI_K3_MARKED, fixture.id


@EACH_FORMAT
def test_a_named_tool_is_called_once(name: str) -> None:
    held = held_by(name, ToolChoice(name="now"))
    for text in walks(held, 8):
        assert [tool for tool, _ in parsed(text, AnswerFormat(name), TOOLS_OFFERED).calls] == ["now"]
        assert has_to_end(held.grammar.text, text)


@EACH_FORMAT
def test_beside_a_format_of_the_text_an_answer_is_calls_or_that_text(name: str) -> None:
    text = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"const":3}},"required":["a"]}')
    answers = AnswerFormat(name)
    held = call_grammar(TOOLS_OFFERED, AUTO, answers, parallel=True, beside=text)
    assert held is not None
    assert not held.demanded
    call = walks(held_by(name, REQUIRED, parallel=False), WALKS)[0]
    written = '{"a": 3}' if name != "gpt-oss" else '<|channel|>final<|message|>{"a": 3}'
    assert ends(held.grammar.text, call)
    assert ends(held.grammar.text, written)
    assert parsed(written, answers, TOOLS_OFFERED).text == '{"a": 3}'
    assert ends(held.grammar.text, written.replace("3", "4")) is None
    assert ends(held.grammar.text, "An oak.") is None
    assert ends(held.grammar.text, "") is not True
