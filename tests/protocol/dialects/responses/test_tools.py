"""The tools of Responses: functions, namespaces of functions, and the tools of other servers."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from protocol.dialects.responses import CreateHttp, parse_http, to_respond
from protocol.dialects.responses.tools import ECHOED_BYTES_MAX, OTHER_TOOLS, echo, joined, left_out, places
from protocol.errors import BadRequest, RequestError, Unsupported
from protocol.messages.tools import NO_PARAMETERS, Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True}
CLOSE = {"type": "function", "name": "close", "description": None, "parameters": None, "strict": False}
AGENTS = {"type": "namespace", "name": "agents_v1", "description": "Agents.", "tools": [CLOSE]}
SEARCH = {"type": "web_search", "external_web_access": True, "filters": {"allowed": ["a.example"]}}
CODEX_BODY = {  # as Codex 0.171.0 sends it
    "model": "m",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
    ],
    "tools": [
        *({**CLOSE, "name": f"tool_{number}", "parameters": {**SCHEMA, "additionalProperties": False}} for number in range(7)),
        {**AGENTS, "tools": [{**CLOSE, "name": name, "parameters": SCHEMA} for name in ("spawn_agent", "close_agent")]},
        SEARCH,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-turn": "1"},
}  # fmt: skip


def post(*tools: Any, leave_out: Collection[str] = (), **fields: Any) -> CreateHttp:
    body = {"model": "m", "input": "Hi", "tools": tools} | fields
    return parse_http(json.dumps(body).encode(), leave_out=leave_out)


def echoed(*tools: Any) -> Any:
    return json.loads(bytes(echo(post(*tools, leave_out=OTHER_TOOLS).tools)))


def refused(kind: type[RequestError], param: str, *tools: Any, **fields: Any) -> str:
    with pytest.raises(kind) as raised:
        post(*tools, **fields)
    assert (type(raised.value), raised.value.param) == (kind, param), raised.value
    return str(raised.value)


def test_functions_and_those_of_namespaces_are_one_list_for_the_model() -> None:
    respond = to_respond(post(WEATHER, AGENTS, parallel_tool_calls=False), request_id="r")
    parameters = json.dumps(SCHEMA, separators=(",", ":"))
    assert respond.tools == (
        Tool("weather", "Of a city.", parameters, strict=True),
        Tool("agents_v1__close", None, NO_PARAMETERS),
    )
    assert (respond.tool_choice, respond.parallel_calls) == (ToolChoice(), False)
    assert to_respond(post(), request_id="r").parallel_calls
    assert places(post(WEATHER, AGENTS).tools or ()) == {
        "weather": (None, "weather"),
        "agents_v1__close": ("agents_v1", "close"),
    }
    assert joined("agents_v1", "close") == "agents_v1__close"


def test_functions_that_are_too_long_together_are_refused_by_name() -> None:
    long = [{**CLOSE, "name": f"f{number}", "description": "d" * 100_000} for number in range(11)]
    assert post(*long[:10]).tools
    assert "characters of descriptions and parameters in all" in refused(BadRequest, "tools", *long)
    assert refused(BadRequest, "tools", *long[:6], {**AGENTS, "tools": long[6:]})


@pytest.mark.parametrize(
    ("choice", "expected", "shown"),
    [
        ("none", ToolChoice(none=True), 0),
        ("required", ToolChoice(required=True), 2),
        ({"type": "function", "name": "weather"}, ToolChoice(required=True, name="weather"), 2),
    ],
)
def test_the_choice_of_tools_reaches_the_processor(choice: Any, expected: ToolChoice, shown: int) -> None:
    respond = to_respond(post(WEATHER, AGENTS, tool_choice=choice), request_id="r")
    assert (respond.tool_choice, len(respond.tools)) == (expected, shown)


def test_the_body_of_codex_is_accepted_where_its_search_is_left_out() -> None:
    body = json.dumps(CODEX_BODY).encode()
    with pytest.raises(Unsupported, match='"web_search" is not supported here') as raised:
        parse_http(body)
    assert raised.value.param == "tools[8].type"
    create = parse_http(body, leave_out={"web_search"})
    respond = to_respond(create, request_id="r")
    names = [*(f"tool_{number}" for number in range(7)), "agents_v1__spawn_agent", "agents_v1__close_agent"]
    assert [tool.name for tool in respond.tools] == names
    assert left_out(create.tools or ()) == ["web_search"]


@pytest.mark.parametrize("kind", sorted(OTHER_TOOLS))
def test_a_tool_of_another_server_is_refused_by_name_or_left_out(kind: str) -> None:
    assert kind in refused(Unsupported, "tools[1].type", WEATHER, {"type": kind, "x": [1]})
    create = post({"type": kind, "x": [1]}, WEATHER, {"type": kind}, leave_out={kind})
    assert [tool.name for tool in to_respond(create, request_id="r").tools] == ["weather"]
    assert left_out(create.tools or ()) == [kind]


def test_a_refusal_lists_such_tools_beside_all_other_mistakes() -> None:
    sentence = refused(BadRequest, "tools[0].name", {**CLOSE, "name": "a b"}, SEARCH, tool_choice="sometimes")
    assert "tool_choice" in sentence
    assert "tools[1].type" in sentence


@pytest.mark.parametrize(
    ("kind", "param", "tools", "fields"),
    [
        (Unsupported, "tools[0].type", [{"type": "sundial"}], {}),
        (BadRequest, "tools[0].type", [{"name": "f"}], {}),
        (BadRequest, "tools[0]", ["f"], {}),
        (Unsupported, "tools[0].defer_loading", [{**CLOSE, "defer_loading": True}], {}),
        (Unsupported, "tools[0].output_schema", [{**CLOSE, "output_schema": {}}], {}),
        (BadRequest, "tools[0].parameters", [{**CLOSE, "parameters": "{}"}], {}),
        (BadRequest, "tools[0].tools", [{**AGENTS, "tools": []}], {}),
        (Unsupported, "tools[0].tools[0].type", [{**AGENTS, "tools": [{"type": "custom", "name": "f"}]}], {}),
        (BadRequest, "tools[1].name", [CLOSE, CLOSE], {}),
        (BadRequest, "tools[1].tools[0].name", [{**CLOSE, "name": "agents_v1__close"}, AGENTS], {}),
        (BadRequest, "tools", [{**AGENTS, "tools": [{**CLOSE, "name": f"f{n}"} for n in range(512)]}, CLOSE], {}),
        (BadRequest, "tool_choice", [], {"tool_choice": "required"}),
        (BadRequest, "tool_choice", [AGENTS], {"tool_choice": {"type": "function", "name": "close"}}),
        (Unsupported, "tool_choice", [CLOSE], {"tool_choice": {"type": "web_search"}}),
        (Unsupported, "max_tool_calls", [CLOSE], {"max_tool_calls": 1}),
    ],
)  # fmt: skip
def test_mistakes_name_their_field(kind: type[BadRequest], param: str, tools: Any, fields: dict[str, Any]) -> None:
    refused(kind, param, *tools, **fields)


def test_an_unknown_type_of_tool_gets_the_types_that_are_served() -> None:
    sentence = 'tools[0].type: "sundial" is not supported here; only "function" or "namespace" is'
    assert refused(Unsupported, "tools[0].type", {"type": "sundial"}) == sentence


def test_the_tools_of_a_response_are_those_that_were_offered() -> None:
    assert echoed(WEATHER, SEARCH, AGENTS) == [WEATHER, AGENTS]
    assert echoed() == []


def test_long_tools_are_returned_without_what_is_long() -> None:
    long = {**WEATHER, "description": "\0" * (ECHOED_BYTES_MAX // 4)}
    for tools in ([{**WEATHER, "description": "x" * ECHOED_BYTES_MAX}, AGENTS], [long, AGENTS]):
        short = {**WEATHER, "description": None, "parameters": None}
        assert echoed(*tools) == [short, {**AGENTS, "description": "", "tools": [CLOSE]}]
