import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocol.dialects.responses import (
    LOGPROBS,
    CancelResponse,
    Create,
    CreateHttp,
    parse_http,
    stream_id_of,
    to_respond,
)
from protocol.errors import BadRequest, PreviousResponseNotFound, Unsupported
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import Respond, Role, Turn
from tests.rig.dialects import check_refused, parse_event

ID = "0123456789abcdef0123456789abcdef"
BASE = {"type": "response.create", "model": "m", "input": "Hi"}
HTTP = {"model": "m", "input": "Hi"}


def create(**fields: object) -> Create:
    result = parse_event(json.dumps(BASE | fields))
    assert isinstance(result, Create)
    return result


def post(**fields: object) -> CreateHttp:
    return parse_http(json.dumps(HTTP | fields).encode())


def refused(kind: type[BadRequest], param: str, sentence: str | None = None, /, **fields: Any) -> None:
    check_refused(parse_event, BASE | fields, kind, param, sentence)


# Requests -----------------------------------------------------------------------------


def test_the_documented_request() -> None:
    text = """{"type":"response.create","model":"m",
        "input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}]}],
        "instructions":null,"tools":[],"previous_response_id":null,"store":false,"max_output_tokens":128,
        "temperature":0.0,"stream_id":"main","generate":true}"""
    request = parse_event(text)
    assert isinstance(request, Create)
    assert request.turns() == (Turn(Role.USER, ("Hi",)),)
    assert (request.model, request.max_output_tokens, request.temperature) == ("m", 128, 0.0)
    assert request.stream_id == "main"


def test_the_shortest_request() -> None:
    assert create().turns() == (Turn(Role.USER, "Hi"),)


def test_fields_of_stock_clients_without_effect_are_accepted() -> None:
    create(
        stream=True, background=False, parallel_tool_calls=True, tool_choice="auto", tools=[], truncation="disabled",
        text={"format": {"type": "text"}, "verbosity": None}, reasoning={"effort": None, "summary": None}, include=[],
        service_tier="auto", user="me", safety_identifier="x", prompt_cache_key="k", metadata={"a": "b"},
        conversation=None, prompt=None, top_logprobs=0, stream_options=None, max_tool_calls=None, stop=None,
        ignore_eos=True, temperature=1, top_p=None,
    )  # fmt: skip


def test_an_item_of_an_earlier_response_is_accepted() -> None:
    item = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": None,
        "content": [{"type": "output_text", "text": "He", "annotations": [], "logprobs": []},
                    {"type": "output_text", "text": "llo"}],
    }  # fmt: skip
    assert create(input=[item, {"role": "user", "content": "and?"}]).turns() == (
        Turn(Role.ASSISTANT, ("He", "llo")),
        Turn(Role.USER, "and?"),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tool_calls", 3),
        ("store", True),
        ("conversation", "conv_1"),
        ("service_tier", "priority"),
        ("stream_options", {"include_obfuscation": True}),
    ],
)
def test_unsupported_fields_are_refused_by_name(field: str, value: object) -> None:
    refused(Unsupported, field, **{field: value})
    check_refused(parse_http, HTTP | {field: value}, Unsupported, field)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        ("include[1]", {"include": ["message.output_text.logprobs", "reasoning.text"]}),
        ("include[0]", {"include": ["file_search_call"]}),
    ],
)
def test_unsupported_values_inside_a_field_are_refused_by_their_path(param: str, fields: dict[str, Any]) -> None:
    refused(Unsupported, param, **fields)


@pytest.mark.parametrize(
    ("param", "items"),
    [
        ("input[0].type", [{"type": "web_search_call", "id": "x"}]),
        ("input[0].type", [{"type": "item_reference", "id": "x"}]),
        ("input[1].content[0].type", [
            {"role": "user", "content": "x"},
            {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]},
        ]),
    ],
)  # fmt: skip
def test_items_and_parts_of_other_types_are_unsupported(param: str, items: Sequence[object]) -> None:
    refused(Unsupported, param, input=items)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": ...}),
        ("model", {"model": ""}),
        ("input", {"input": ...}),
        ("input", {"input": []}),
        ("input[0]", {"input": ["x"]}),
        ("input[0].role", {"input": [{"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"text": "x"}]}]}),
        ("input[0].colour", {"input": [{"role": "user", "content": "x", "colour": 1}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_output_tokens", {"max_output_tokens": "16"}),
        ("min_tokens", {"min_tokens": 9, "max_output_tokens": 8}),
        ("stream_id", {"stream_id": "a b"}),
        ("stream_id", {"stream_id": "x" * 257}),
        ("metadata.a", {"metadata": {"a": 1}}),
        ("metadata", {"metadata": {str(key): "" for key in range(17)}}),
        ("max_tokens", {"max_tokens": 5}),
        ("response_format", {"response_format": {"type": "text"}}),
        ("truncation", {"truncation": "sometimes"}),
        ("include", {"include": "message.output_text.logprobs"}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 21, "include": [LOGPROBS]}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}),
        ("text.format.name", {"text": {"format": {"type": "text", "name": "x"}}}),
        ("type", {"type": ...}),
    ],
)
def test_mistakes_name_their_field(param: str, fields: dict[str, Any]) -> None:
    refused(BadRequest, param, **fields)


def test_the_ends_of_ranges_are_accepted() -> None:
    create(min_tokens=8, max_output_tokens=8, stream_id="x" * 256)


def test_several_mistakes_are_one_error() -> None:
    refused(
        BadRequest,
        "temperature",
        "temperature: must be at least 0 and at most 2, got 5; top_k: expected an integer, got true; "
        "modell: is not a key here; did you mean model?",
        temperature=5, top_k=True, modell="x",
    )  # fmt: skip
    refused(
        Unsupported,
        "store",
        "store: true is not supported here; only false is; max_tool_calls: 1 is not supported here; leave it out",
        max_tool_calls=1, store=True,
    )  # fmt: skip


def test_a_long_list_of_mistakes_is_cut() -> None:
    with pytest.raises(BadRequest, match=r"; and 8 more$") as raised:
        parse_event(json.dumps(BASE | {"input": [1] * 5000}))
    assert len(str(raised.value)) < 1000


def test_unknown_events_are_unsupported() -> None:
    refused(Unsupported, "type", type="response.steer")
    refused(Unsupported, "type", type="x" * 10_000)


def test_http_and_websocket_requests_become_the_same_request() -> None:
    fields = {"instructions": "i", "max_output_tokens": 5, "metadata": {"a": "b"}, "user": "u", "min_tokens": 1}
    assert to_respond(post(**fields), request_id=ID) == to_respond(create(**fields), request_id=ID)
    assert (post().stream, post(stream=True).stream, post(stream=False).stream) == (None, True, False)


@pytest.mark.parametrize(
    ("kind", "param", "fields"),
    [
        (Unsupported, "background", {"background": True}),
        (Unsupported, "generate", {"generate": False}),
        (Unsupported, "store", {"store": True}),
        (PreviousResponseNotFound, "previous_response_id", {"previous_response_id": "resp_1"}),
        (BadRequest, "stream_id", {"stream_id": "main"}),
        (BadRequest, "type", {"type": "response.create"}),
    ],
)
def test_fields_of_websockets_are_refused_over_http(kind: type[BadRequest], param: str, fields: dict[str, Any]) -> None:
    check_refused(parse_http, HTTP | fields, kind, param)


def test_fields_without_effect_are_accepted_over_http() -> None:
    post(background=False, store=False, generate=True, stream=False, previous_response_id=None, truncation="disabled",
         include=[], top_logprobs=0, text={"format": {"type": "text"}, "verbosity": "medium"},
         service_tier="default", stream_options={"include_obfuscation": False})  # fmt: skip


def test_log_probabilities_are_requested_by_include_alone() -> None:
    assert to_respond(create(), request_id=ID).logprobs is None
    assert to_respond(create(top_logprobs=0), request_id=ID).logprobs is None
    assert to_respond(create(include=[LOGPROBS]), request_id=ID).logprobs == 0
    assert to_respond(create(include=[LOGPROBS], top_logprobs=20), request_id=ID).logprobs == 20


def test_a_warm_up_computes_the_prompt_only() -> None:
    assert create(generate=False).warm_up
    assert not create(generate=True).warm_up
    assert not create(generate=None).warm_up
    assert not post().warm_up


def test_the_model_may_be_given_by_the_address() -> None:
    bare = {"type": "response.create", "input": "Hi"}
    for data, model in ((bare, "q"), (BASE, "m")):
        request = parse_event(json.dumps(data), default_model="q")
        assert isinstance(request, Create)
        assert request.model == model


def test_cancel() -> None:
    assert parse_event('{"type":"response.cancel","response_id":"resp_1","stream_id":"a"}') == CancelResponse(
        type="response.cancel", response_id="resp_1", stream_id="a"
    )
    assert parse_event('{"type":"response.cancel"}') == CancelResponse(type="response.cancel")
    refused(BadRequest, "response_id", type="response.cancel", response_id=5, event_id="x", model=..., input=...)


def test_the_lane_of_an_invalid_request_is_read_if_it_is_valid() -> None:
    assert stream_id_of({"type": 5, "stream_id": "a"}) == "a"
    assert stream_id_of({"stream_id": "a b"}) is None
    assert stream_id_of({"stream_id": 5}) is None
    assert stream_id_of({}) is None


# For a processor ------------------------------------------------------------------------


def test_to_respond_maps_every_field() -> None:
    request = create(
        instructions="be brief", input=[{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}],
        max_output_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, frequency_penalty=0.2,
        presence_penalty=0.3, repetition_penalty=1.1, stop="END", stop_token_ids=[3], ignore_eos=True, seed=7,
        logit_bias={"4": -1}, include_stop_str_in_output=True, return_token_ids=True, priority=5, cache_salt="salt",
        include=[LOGPROBS], top_logprobs=3, truncation="auto", generate=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"b": [1], "a": None}, "strict": True}},
    )  # fmt: skip
    history = (Turn(Role.USER, "a"), Turn(Role.ASSISTANT, "b"))
    assert to_respond(request, request_id=ID, history=history) == Respond(
        id=ID,
        turns=(Turn(Role.SYSTEM, "be brief"), *history, Turn(Role.DEVELOPER, "d"), Turn(Role.USER, "u")),
        tokens_max=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, frequency_penalty=0.2,
        presence_penalty=0.3, repetition_penalty=1.1, stop=("END",), stop_token_ids=(3,), ignore_eos=True, seed=7,
        logit_bias={4: -1.0}, stop_included=True, token_ids=True, priority=5, cache_salt="salt", logprobs=3,
        truncate=True, warm_up=True, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"b":[1],"a":null}'),
        params={"turns": "input", "tokens_max": "max_output_tokens", "tokens_min": "min_tokens",
                "logprobs": "top_logprobs", "grammar": "text.format"},
    )  # fmt: skip
    respond = to_respond(request, request_id=ID)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(respond), type=Respond) == respond
    assert to_respond(create(min_tokens=2), request_id=ID).tokens_min == 2  # which no grammar may stand beside
    plain = to_respond(create(), request_id=ID)
    assert plain == Respond(ID, (Turn(Role.USER, "Hi"),), params=plain.params)
