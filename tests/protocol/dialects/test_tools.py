"""Tools of requests: what stock clients send is taken, and every mistake is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from protocol.dialects.chat import ChatRequest, parse, to_respond
from protocol.dialects.tools import TOOL_CHARACTERS_MAX, call_id
from protocol.errors import BadRequest, Unsupported
from protocol.messages.text import Role, Turn
from protocol.messages.tools import AUTO, NO_PARAMETERS, Tool, ToolCall, ToolChoice, read_arguments
from tests.rig.dialects import check_refused

ID = "0123456789abcdef0123456789abcdef"
FUNCTION = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "done"}


def request(**fields: object) -> ChatRequest:
    return parse(json.dumps(BASE | fields).encode())


def turns(*messages: Mapping[str, object]) -> tuple[Turn, ...]:
    return to_respond(request(messages=[*BASE["messages"], *messages]), request_id=ID).turns


def test_a_function_reaches_the_processor() -> None:
    parameters = '{"type":"object","properties":{"a":{"type":"string"}}}'
    respond = to_respond(request(), request_id=ID)
    assert respond.tools == (Tool("f", "F.", parameters),)
    assert (respond.tool_choice, respond.parallel_calls) == (AUTO, True)


@pytest.mark.parametrize(
    ("function", "tool"),
    [
        ({"name": "f"}, Tool("f", None, NO_PARAMETERS)),
        ({"name": "f", "strict": None, "parameters": None}, Tool("f")),
        ({"name": "f", "strict": True}, Tool("f", strict=True)),
        ({"name": "mcp__x-y.z", "strict": False}, Tool("mcp__x-y.z")),
        ({"name": "f", "parameters": {"$schema": "x", "title": "t"}}, Tool("f", None, '{"$schema":"x","title":"t"}')),
    ],
)
def test_a_function_in_every_form(function: dict[str, object], tool: Tool) -> None:
    assert to_respond(request(tools=[{"type": "function", "function": function}]), request_id=ID).tools == (tool,)


@pytest.mark.parametrize(
    ("choice", "expected", "shown"),
    [
        (None, AUTO, 1),
        ("auto", AUTO, 1),
        ("none", ToolChoice(none=True), 0),
        ("required", ToolChoice(required=True), 1),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice(required=True, name="f"), 1),
        ({"type": "function", "name": "f"}, ToolChoice(required=True, name="f"), 1),
        ({"type": "auto"}, AUTO, 1),
    ],
)
def test_the_choice_among_tools(choice: object, expected: ToolChoice, shown: int) -> None:
    respond = to_respond(request(tool_choice=choice), request_id=ID)
    assert respond.tool_choice == expected
    # A model that may call none sees none.
    assert len(respond.tools) == shown


def test_calls_one_after_the_other() -> None:
    assert to_respond(request(parallel_tool_calls=False), request_id=ID).parallel_calls is False


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_an_answer_with_calls_and_their_results(content: dict[str, object]) -> None:
    message = {"role": "assistant", "tool_calls": [CALL], **content}
    assert turns(message, RESULT)[1:] == (
        Turn(Role.ASSISTANT, "", calls=(ToolCall("call_1", "f", '{"a": "b"}'),)),
        Turn(Role.TOOL, "done", call_id="call_1"),
    )


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_a_call_without_arguments(arguments: str) -> None:
    call = {"id": "call_1", "function": {"name": "f", "arguments": arguments}}
    assert json.loads(turns({"role": "assistant", "tool_calls": [call]}, RESULT)[1].calls[0].arguments) == {}


def test_an_answer_is_taken_as_openai_has_read_it() -> None:
    """Its client adds what it has parsed to the answer of a stream, and sends it with the other fields."""
    read = {"id": "call_1", "function": {"name": "f", "arguments": '{"a": "b"}', "parsed_arguments": {"a": "b"}}}
    null = {"id": "call_2", "function": {"name": "f", "arguments": "{}", "parsed_arguments": None}}
    answer = {"role": "assistant", "content": None, "parsed": None, "tool_calls": [read, null]}
    typed = {"role": "assistant", "content": '{"a":1}', "parsed": {"a": 1}}
    assert turns(answer, RESULT, {**RESULT, "tool_call_id": "call_2"}, typed)[1::3] == (
        Turn(Role.ASSISTANT, "", calls=(ToolCall("call_1", "f", '{"a": "b"}'), ToolCall("call_2", "f", "{}"))),
        Turn(Role.ASSISTANT, '{"a":1}'),
    )


def test_each_answer_may_count_its_calls_anew() -> None:
    assert len(turns(CALLED, RESULT, CALLED, RESULT)) == 5
    many = [{**CALL, "id": f"call_{number}"} for number in range(1000)]
    assert len(turns({**CALLED, "tool_calls": many})[1].calls) == 1000


def test_the_result_of_a_call_may_be_in_parts() -> None:
    result = {**RESULT, "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "f"}
    assert turns(CALLED, result)[2] == Turn(Role.TOOL, ("one", "two"), call_id="call_1")


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", 'is the name of two tools, "f"'),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", None),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "has no name of a function"),
    ],
)
def test_mistakes_in_tools(fields: dict[str, Any], param: str, sentence: str | None) -> None:
    check_refused(parse, BASE | fields, BadRequest, param, None if sentence is None else f"{param}: {sentence}")


def test_tools_that_are_too_long_together_are_refused_by_name() -> None:
    tools = [
        {"type": "function", "function": FUNCTION | {"name": f"f{number}", "description": "d" * 100_000}}
        for number in range(11)
    ]
    assert request(tools=tools[:10]).tools is not None
    sentence = f"must have at most {TOOL_CHARACTERS_MAX} characters of descriptions and parameters in all, have 11005"
    for body in (BASE | {"tools": tools}, BASE | {"tools": tools, "tool_choice": "none"}):
        with pytest.raises(BadRequest, match=sentence) as refused:
            parse(json.dumps(body).encode())
        assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "any"},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        parse(json.dumps(BASE | fields).encode())
    assert "is not supported here" in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([RESULT], "messages[1].tool_call_id"),
        ([CALLED, {"role": "tool", "content": "x"}], "messages[2].tool_call_id"),
        ([CALLED, {"role": "user", "content": "x", "tool_call_id": "call_1"}], "messages[2].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[1].tool_calls"),
        ([{**CALLED, "tool_calls": [CALL, CALL]}], "messages[1].tool_calls[1].id"),
        ([CALLED, {"role": "tool", "tool_call_id": "call_1"}], "messages[2].content"),
    ],
)
def test_mistakes_in_calls(messages: list[dict[str, object]], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        turns(*messages)
    assert refused.value.param == param


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", '"{}"', "[" * 3000])
def test_arguments_have_to_be_an_object(arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest) as refused:
        turns({"role": "assistant", "tool_calls": [call]}, RESULT)
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"
    assert "must be the JSON text of an object" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": "\\ud83d"}', {"a": "?"}),
        ('{"a": "\\ud83d\\ude42"}', {"a": "\N{SLIGHTLY SMILING FACE}"}),
        ('{"a": 1e999}', {"a": float("inf")}),
        ('{"a": ' + "9" * 5000 + "}", {"a": float("inf")}),
        ('{"a": "' + "x" * 200_000 + '"}', {"a": "x" * 200_000}),
    ],
    ids=["half a pair", "a pair", "a large fraction", "a large integer", "a large text"],
)
def test_arguments_that_a_model_may_write_are_taken_back(arguments: str, read: object) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [_, called, _] = turns({"role": "assistant", "tool_calls": [call]}, RESULT)
    assert called.calls[0].arguments == arguments
    assert read_arguments(arguments) == read


@pytest.mark.parametrize(("outer", "inner", "strict"), [(True, None, True), (True, False, False), (None, True, True)])
def test_strict_may_stand_beside_the_function(outer: bool | None, inner: bool | None, strict: bool) -> None:
    tool = {"type": "function", "strict": outer, "function": {**FUNCTION, "strict": inner}}
    assert to_respond(request(tools=[tool]), request_id=ID).tools[0].strict is strict


def test_ids_of_calls_differ_and_are_short() -> None:
    ids = {call_id(ID, choice, index) for choice in (0, 127) for index in (0, 1, 999)}
    assert len(ids) == 6
    assert max(map(len, ids)) <= 40
