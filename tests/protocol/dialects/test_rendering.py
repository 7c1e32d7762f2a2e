"""The fields of requests about chat templates, in each dialect, and the keys that cost nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from protocol.dialects import chat, completions, responses, tokens
from protocol.dialects.other_servers import CHAT_KEYS, GENERATION_KEYS
from protocol.errors import BadRequest, Unsupported
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Role, Turn
from tests.rig.dialects import check_refused, parse_event

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "I th"}


def rendering(dialect: str, **fields: Any) -> Rendering:
    messages = fields.pop("messages", [USER])
    if dialect == "tokenize":
        data = json.dumps({"messages": messages, **fields}).encode()
        return tokens.to_tokenize(tokens.parse_tokenize(data)).rendering
    if dialect == "chat":
        data = json.dumps({"model": "m", "messages": messages, **fields}).encode()
        return chat.to_respond(chat.parse(data), request_id="r").rendering
    if "reasoning_effort" in fields:
        fields["reasoning"] = {"effort": fields.pop("reasoning_effort")}
    body = {"model": "m", "input": messages, **fields}
    if dialect == "posted":
        return responses.to_respond(responses.parse_http(json.dumps(body).encode()), request_id="r").rendering
    created = parse_event(json.dumps({"type": "response.create", **body}))
    assert isinstance(created, responses.Create)
    return responses.to_respond(created, request_id="r").rendering


@pytest.mark.parametrize("dialect", ["chat", "posted", "socket", "tokenize"])
def test_what_a_client_asks_of_the_template(dialect: str) -> None:
    kwargs = {"enable_thinking": False, "documents": [{"title": "a"}]}
    field = "reasoning.effort" if dialect in {"posted", "socket"} else "reasoning_effort"
    assert rendering(dialect, chat_template_kwargs=kwargs) == Rendering(kwargs, effort_field=field)
    assert rendering(dialect, reasoning_effort="high") == Rendering(effort="high", effort_field=field)
    continued = Rendering(effort_field=field, continues=True, begins_answer=False)
    assert rendering(dialect, messages=[USER, BEGUN], continue_final_message=True) == continued
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendering(dialect, messages=[USER, BEGUN], **both) == continued
    assert rendering(dialect, messages=[USER, BEGUN], add_generation_prompt=False) == evolve(continued, continues=False)


@pytest.mark.parametrize("dialect", ["chat", "tokenize"])
def test_a_last_message_with_prefix_is_continued(dialect: str) -> None:
    continued = rendering(dialect, messages=[USER, BEGUN], continue_final_message=True)
    begun = {**BEGUN, "prefix": True}
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        assert rendering(dialect, messages=[USER, begun], **fields) == continued
    assert rendering(dialect, messages=[{**USER, "prefix": False}, {**BEGUN, "prefix": None}]) is DEFAULT_RENDERING
    for param, messages, added in (
        ("messages[1].prefix", [USER, begun, USER], {}),
        ("messages[1].prefix", [USER, begun, begun], {}),
        ("messages[0].prefix", [{**USER, "prefix": True}], {}),
        ("add_generation_prompt", [USER, begun], {"add_generation_prompt": True}),
        ("messages[1].prefix", [USER, {**BEGUN, "prefix": "yes"}], {}),
    ):
        body = {"messages": messages, **added}
        check_refused(tokens.parse_tokenize, body, BadRequest, param)
        check_refused(chat.parse, {"model": "m", **body}, BadRequest, param)


@pytest.mark.parametrize("parse", [chat.parse, completions.parse])
def test_keys_of_responses_that_cost_nothing_are_taken_elsewhere(parse: Any) -> None:
    body: dict[str, Any] = {"model": "m"} | ({"messages": [USER]} if parse is chat.parse else {"prompt": "Hi"})
    harmless: list[dict[str, Any]] = [
        {"reasoning": {}},
        {"reasoning": {"effort": None}},
        {"client_metadata": {"turn": "1"}},
    ]
    for fields in harmless:
        assert parse(json.dumps(body | fields)) == parse(json.dumps(body | {"reasoning": None}))
    check_refused(parse, body | {"reasoning": {"effort": "high"}}, Unsupported, "reasoning")
    check_refused(parse, body | {"client_metadata": "turn"}, BadRequest, "client_metadata")


@pytest.mark.parametrize("dialect", ["chat", "posted", "socket", "tokenize"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {}, "reasoning_effort": None},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"messages": [USER, BEGUN]},
    ],
)
def test_what_asks_for_nothing_is_the_default(dialect: str, fields: dict[str, Any]) -> None:
    assert rendering(dialect, **fields) is DEFAULT_RENDERING


@pytest.mark.parametrize(
    ("param", "fields", "sentence"),
    [
        ("continue_final_message", {"continue_final_message": True},
         "needs the last message to be the assistant's, not one of user"),
        ("continue_final_message",
         {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
         "cannot stand beside add_generation_prompt: an answer goes on with a message, or begins a new one"),
        ("reasoning_effort", {"reasoning_effort": "much"},
         'expected "none", "minimal", "low", "medium", "high", "xhigh" or "max", got "much"'),
        ("chat_template_kwargs", {"chat_template_kwargs": []}, "expected an object, got a list"),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": [2**64]}}, "has an integer of more than 64 bits"),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 131_072}},
         "must have at most 131072 bytes as JSON, has 131080"),
    ],
)  # fmt: skip
def test_wrong_wishes_are_refused_by_their_field(param: str, fields: dict[str, Any], sentence: str) -> None:
    body = {"model": "m", "messages": [USER], **fields}
    check_refused(chat.parse, body, BadRequest, param, f"{param}: {sentence}")
    del body["model"]
    check_refused(tokens.parse_tokenize, body, BadRequest, param, f"{param}: {sentence}")


# Messages ---------------------------------------------------------------------------------


def turns(*messages: dict[str, Any]) -> tuple[Turn, ...]:
    data = json.dumps({"model": "m", "messages": messages}).encode()
    return chat.to_respond(chat.parse(data), request_id="r").turns


def test_every_key_of_a_message_is_taken_as_documented() -> None:
    hint = {"type": "ephemeral"}
    assert turns(
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": hint}], "name": "boss"},
        {"role": "user", "name": "bob", "content": "Hi", "cache_control": hint},
        {"role": "assistant", "content": None, "refusal": "No.", "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "Well,", "refusal": "no."},
        {"role": "assistant", "content": "x", "reasoning_content": "why", "reasoning": "why", "refusal": ""},
    ) == (
        Turn(Role.SYSTEM, ("s",), name="boss"),
        Turn(Role.USER, "Hi", name="bob"),
        Turn(Role.ASSISTANT, "No."),
        Turn(Role.ASSISTANT, ("Never.",)),
        Turn(Role.ASSISTANT, ""),
        Turn(Role.ASSISTANT, ("Well,", "no.")),
        Turn(Role.ASSISTANT, "x", reasoning="why"),
    )


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("content", {"role": "user", "content": None}),
        ("name", {"role": "user", "content": "x", "name": 5}),
        ("refusal", {"role": "user", "content": "x", "refusal": "No."}),
        ("reasoning_content", {"role": "system", "content": "x", "reasoning_content": "y"}),
        ("reasoning", {"role": "assistant", "content": "x", "reasoning_content": "y", "reasoning": "z"}),
        ("content[0]", {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}),
        ("cache_control", {"role": "user", "content": "x", "cache_control": "yes"}),
    ],
)
def test_what_a_message_cannot_have_is_refused_by_its_key(param: str, message: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [message, USER]}
    check_refused(chat.parse, body, BadRequest, f"messages[0].{param}")


def test_the_items_of_an_answer_are_taken_back() -> None:
    output = {"type": "output_text", "text": "Yes.", "annotations": [{"type": "url_citation"}], "logprobs": []}
    refusal = {"type": "refusal", "refusal": "No."}
    item = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [output, refusal]}
    create = responses.parse_http(json.dumps({"model": "m", "input": [item, USER]}).encode())
    assert responses.to_respond(create, request_id="r").turns[0] == Turn(Role.ASSISTANT, ("Yes.", "No."))
    body = {"model": "m", "input": [{"role": "user", "content": [refusal]}]}
    check_refused(responses.parse_http, body, BadRequest, "input[0].content[0]")


# Keys that cost nothing -------------------------------------------------------------------


def test_keys_of_other_servers_are_taken_with_their_defaults_and_refused_with_anything_else() -> None:
    for keys, parse, base in (
        ({**GENERATION_KEYS, **CHAT_KEYS}, chat.parse, {"model": "m", "messages": [USER]}),
        (GENERATION_KEYS, completions.parse, {"model": "m", "prompt": "Hi"}),
        (GENERATION_KEYS, responses.parse_http, {"model": "m", "input": "Hi"}),
    ):
        for name, values in keys.items():
            for value in (None, *values):
                parse(json.dumps(base | {name: value}).encode())
            check_refused(parse, base | {name: {"other": 1}}, Unsupported, name)


@pytest.mark.parametrize(
    "fields",
    [
        {"client_metadata": {"x-codex-turn": "1"}},
        {"reasoning": {}},
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": {"summary": "auto", "generate_summary": "auto", "context": "auto"}},
        {"include": ["reasoning.encrypted_content"]},
        {"include": ["file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources"]},
        {"text": {"verbosity": "medium"}, "prompt_cache_options": {"mode": "implicit"}, "service_tier": "auto"},
        {"prompt_cache_retention": "24h"},
        {"truncation": "disabled", "background": False, "parallel_tool_calls": True, "top_logprobs": 0},
    ],
)
def test_keys_of_responses_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    plain = responses.to_respond(responses.parse_http(b'{"model": "m", "input": "Hi"}'), request_id="r")
    asked = responses.parse_http(json.dumps({"model": "m", "input": "Hi", **fields}).encode())
    assert responses.to_respond(asked, request_id="r") == plain
