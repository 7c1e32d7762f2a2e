import json
from typing import Any

import msgspec
import pytest
from openai.types.model import Model as OpenAIModel

from protocol.dialects.chat import ChatRequest, parse, to_respond
from protocol.dialects.http import Model, error_body, error_headers, models_body
from protocol.errors import ERRORS_BY_CODE, BadRequest, InternalError, Overloaded, Unsupported
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import Respond, Role, Turn
from tests.rig.dialects import check_refused

ID = "0123456789abcdef0123456789abcdef"
BASE = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PARAMS = {"turns": "messages", "tokens_min": "min_tokens", "logprobs": "top_logprobs"}


def request(**fields: object) -> ChatRequest:
    return parse(json.dumps(BASE | fields).encode())


def refused(kind: type[BadRequest], param: str, sentence: str | None = None, /, **fields: int) -> None:
    check_refused(parse, BASE | fields, kind, param, sentence)


# Requests -----------------------------------------------------------------------------


def test_the_shortest_request() -> None:
    assert to_respond(request(), request_id=ID) == Respond(
        ID, (Turn(Role.USER, "Hi"),), params=PARAMS | {"tokens_max": "max_completion_tokens"}
    )


@pytest.mark.parametrize(
    "body",
    [
        # sglang.bench_serving, vllm bench serve, guidellm and aiperf, as they are
        {"max_completion_tokens": 16, "stream": True, "temperature": 0.0, "ignore_eos": True},
        {"max_completion_tokens": 16, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
         "repetition_penalty": 1.0, "ignore_eos": True,
         "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"max_completion_tokens": 16, "stop": None, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"max_tokens": 16, "min_tokens": 16, "best_of": 1, "logprobs": None, "stop": None, "n": 1},
        {"max_tokens": 16, "max_completion_tokens": 16},
        # fields of OpenAI's that ask for nothing
        {"n": 1, "logprobs": False, "logit_bias": {}, "tools": [], "tool_choice": "none", "store": False,
         "response_format": {"type": "text"}, "reasoning_effort": None, "user": "me", "metadata": {"a": "b"},
         "service_tier": "auto", "parallel_tool_calls": True, "modalities": ["text"], "stream": False,
         "stream_options": None, "top_logprobs": None, "frequency_penalty": 0, "presence_penalty": 0.0},
    ],
)  # fmt: skip
def test_bodies_of_stock_clients_are_accepted(body: dict[str, Any]) -> None:
    assert request(**body).messages[0].turn(0).text == "Hi"


def test_messages_of_every_role() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ]  # fmt: skip
    assert to_respond(request(messages=messages), request_id=ID).turns == (
        Turn(Role.SYSTEM, "s"),
        Turn(Role.DEVELOPER, "d"),
        Turn(Role.USER, ("a", "b")),
        Turn(Role.ASSISTANT, "x"),
        Turn(Role.USER, ""),
    )


def test_to_respond_maps_every_field() -> None:
    body = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1, "stop": ["a", "b"],
        "stop_token_ids": [3], "ignore_eos": True, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 4,
        "logit_bias": {"0": -100, "17": 1.5}, "include_stop_str_in_output": True, "return_token_ids": True,
        "priority": -3, "cache_salt": "s", "ebnf": "root ::= x",
    }  # fmt: skip
    respond = to_respond(request(**body), request_id=ID)
    assert respond == Respond(
        ID, (Turn(Role.USER, "Hi"),), n=3, tokens_max=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1,
        frequency_penalty=0.2, presence_penalty=0.3, repetition_penalty=1.1, stop=("a", "b"), stop_included=True,
        stop_token_ids=(3,), ignore_eos=True, seed=7, logit_bias={0: -100.0, 17: 1.5}, logprobs=4, token_ids=True,
        grammar=Grammar(GrammarKind.EBNF, "root ::= x"), priority=-3, cache_salt="s",
        params=PARAMS | {"tokens_max": "max_tokens", "grammar": "ebnf"},
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(respond), type=Respond) == respond
    assert to_respond(request(min_tokens=2), request_id=ID).tokens_min == 2  # which no grammar may stand beside


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("best_of", {"best_of": 4}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tool_choice": "any"}),
        ("response_format.type", {"response_format": {"type": "grammar", "grammar": "x"}}),
        ("store", {"store": True}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
        ("messages[0].role", {"messages": [{"role": "function", "content": "x", "name": "c"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {}}]}]}),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    refused(Unsupported, param, **fields)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": ...}),
        ("messages", {"messages": ...}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        (
            "messages[1].content",
            {"messages": [{"role": "user", "content": ""}, {"role": "system", "content": None}]},
        ),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
        ("stream", {"stream": "true"}),
        ("stream_options.usage", {"stream_options": {"usage": True}}),
        ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("min_tokens", {"max_tokens": 5, "min_tokens": 6}),
        ("max_output_tokens", {"max_output_tokens": 5}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"logprobs": False, "top_logprobs": 5}),
    ],
)
def test_mistakes_name_their_field(param: str, fields: dict[str, Any]) -> None:
    refused(BadRequest, param, **fields)


def test_several_mistakes_are_one_error() -> None:
    sentence = (
        "best_of: 2 is not supported here; only 1 is; temperature: expected a number, got true; "
        "max_token: is not a key here; did you mean max_tokens?"
    )
    refused(BadRequest, "best_of", sentence, best_of=2, temperature=True, max_token=5)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"messages":' + b"[" * 10_000, "nested too deeply"),
    ],
)
def test_bodies_that_are_not_valid_json_are_refused(body: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse(body)


# Errors and models ------------------------------------------------------------------------


def test_error_bodies_and_headers() -> None:
    assert json.loads(error_body(BadRequest("no", param="n"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    }
    assert error_headers(BadRequest("no")) == [(b"x-should-retry", b"false")]
    assert error_headers(InternalError("a bug")) == [(b"x-should-retry", b"false")]
    assert error_headers(Overloaded("full")) == [(b"retry-after", b"1"), (b"x-should-retry", b"true")]


def test_every_error_has_a_type_that_fits_its_status() -> None:
    for cls in ERRORS_BY_CODE.values():
        kind = json.loads(error_body(cls("x")))["error"]["type"]
        if cls.http_status == 429:
            assert kind == "rate_limit_error"
        else:
            assert kind == ("server_error" if cls.http_status >= 500 else "invalid_request_error")


def test_models() -> None:
    body = json.loads(models_body([Model("m", 1686935002, "org/m", 32768, honours_seed=False)]))
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model == {
        "object": "model", "id": "m", "created": 1686935002, "owned_by": "espalier", "root": "org/m",
        "max_model_len": 32768, "honours_seed": False, "parent": None, "task": "generate", "embedding": None,
    }  # fmt: skip
    OpenAIModel.model_validate(model, strict=True)
