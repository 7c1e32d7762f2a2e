import json

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model as OpenAIModel
from pydantic import BaseModel

from protocol.dialects.chat import ChatRequest, Chunks, completion, completion_id, parse, to_respond
from protocol.dialects.http import Model, error_body, error_headers, models_body
from protocol.errors import BY_CODE, BadRequest, EngineLost, Internal, Overloaded, RequestError, Unsupported
from protocol.messages import Finished, FinishReason, Respond, Role, Turn, Usage

ID = "0123456789abcdef0123456789abcdef"
BASE = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3)
WHOLE = Finished(FinishReason.STOP, USAGE)


def request(**fields) -> ChatRequest:
    return parse(json.dumps(BASE | fields).encode())


def refused(kind, param, said=None, /, **fields):
    data = {key: value for key, value in (BASE | fields).items() if value is not ...}
    with pytest.raises(BadRequest) as raised:
        parse(json.dumps(data).encode())
    assert (type(raised.value), raised.value.param) == (kind, param), raised.value
    if said is not None:
        assert str(raised.value) == said


def extras(model):
    """Every key that openai's types do not know."""
    for name, value in dict(model).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from (f"{name}.{key}" for key in extras(each))
    yield from model.model_extra or ()


def check(cls, text):
    """Parse with openai's own class, which must know every key."""
    model = cls.model_validate(json.loads(text), strict=True)
    assert list(extras(model)) == []
    return model


def events(stream: bytes) -> list[bytes]:
    """Cut a stream as the strictest client does: nothing but `data: ` lines, each followed by an empty one."""
    *lines, rest = stream.split(b"\n\n")
    assert rest == b""
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [line.removeprefix(b"data: ") for line in lines]


# What clients say ---------------------------------------------------------------------


def test_the_shortest_request():
    assert to_respond(request(), request_id=ID) == Respond(
        ID,
        (Turn(Role.USER, "Hi"),),
        params={"turns": "messages", "tokens_max": "max_completion_tokens", "tokens_min": "min_tokens"},
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
def test_bodies_of_stock_clients_are_accepted(body):
    assert request(**body).messages[0].turn() == Turn(Role.USER, "Hi")


def test_messages_of_every_role():
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
        Turn(Role.USER, "ab"),
        Turn(Role.ASSISTANT, "x"),
        Turn(Role.USER, ""),
    )


def test_to_respond_maps_every_field():
    body = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1, "stop": ["a", "b"],
        "stop_token_ids": [3], "ignore_eos": True, "seed": 7,
    }  # fmt: skip
    respond = to_respond(request(**body), request_id=ID)
    assert respond.params["tokens_max"] == "max_tokens"
    expected = body | {"tokens_max": 9, "tokens_min": 2, "stop": ("a", "b"), "stop_token_ids": (3,)}
    for name in expected.keys() - {"max_tokens", "min_tokens"}:
        assert getattr(respond, name) == expected[name]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(respond), type=Respond) == respond


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 2}),
        ("n", {"n": True}),
        ("best_of", {"best_of": 4}),
        ("logprobs", {"logprobs": True}),
        ("logprobs", {"logprobs": 0}),
        ("top_logprobs", {"top_logprobs": 5}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": {"type": "function"}}),
        ("functions", {"functions": [{}]}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("reasoning_effort", {"reasoning_effort": "high"}),
        ("store", {"store": True}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}),
        ("messages[0].role", {"messages": [{"role": "function", "content": "x", "name": "f"}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}),
        ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": "me"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://x"}}]}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {}}]}]}),
    ],
)  # fmt: skip
def test_what_this_server_does_not_do_is_refused_by_name(param, fields):
    refused(Unsupported, param, **fields)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": ...}),
        ("model", {"model": 5}),
        ("messages", {"messages": ...}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi"}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].role", {"messages": [{"role": None, "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        (
            "messages[1].content",
            {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]},
        ),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
        ("stream", {"stream": 1}),
        ("stream", {"stream": "true"}),
        ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
        ("stream_options.usage", {"stream_options": {"usage": True}}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("min_tokens", {"max_tokens": 5, "min_tokens": 6}),
        ("max_completion_tokens", {"max_completion_tokens": 1.5}),
        ("temperature", {"temperature": True}),
        ("temperature", {"temperature": -0.1}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop[0]", {"stop": ["x" * 1025]}),
        ("seed", {"seed": -(2**63) - 1}),
        ("max_output_tokens", {"max_output_tokens": 5}),
    ],
)
def test_mistakes_name_their_field(param, fields):
    refused(BadRequest, param, **fields)


def test_several_mistakes_are_one_error():
    said = (
        "n: 2 is not supported here; only 1 is; temperature: expected a number, got true; "
        "max_token: is not a key here; did you mean max_tokens?"
    )
    refused(BadRequest, "n", said, n=2, temperature=True, max_token=5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}', "surrogate"),
        (b'{"temperature":NaN}', "not JSON"),
        (b'{"messages":' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 1_000_000, "nested too deeply"),
        (b"\x00" * 100, "not JSON"),
        (b'"model"', "expected a JSON object"),
    ],
)
def test_bodies_that_cannot_be_read(body, said):
    with pytest.raises(BadRequest, match=said):
        parse(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted({*ChatRequest.harmless, *(field.name for field in attrs.fields(ChatRequest))})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]) | json_values},
        optional={
            "content": st.lists(
                st.fixed_dictionaries({"type": st.sampled_from(["text"]) | json_values, "text": json_values}),
                max_size=3,
            )
            | json_values,
            "tool_calls": json_values,
        },
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=300)
@given(json_values | st.dictionaries(st.sampled_from(NAMES), json_values | MESSAGES, max_size=6))
def test_any_json_is_answered_or_refused(value):
    for data in (value, BASE | value if isinstance(value, dict) else value):
        try:
            result = parse(json.dumps(data).encode())
        except RequestError as error:
            json.loads(error_body(error))
        else:
            respond = to_respond(result, request_id=ID)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(respond), type=Respond) == respond


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_refused(body):
    with pytest.raises(RequestError):
        parse(body)


# What clients hear ----------------------------------------------------------------------


def chunks_of(**fields):
    return Chunks(request(**fields), request_id=ID, created=1694268190)


def test_one_whole_stream():
    chunks = chunks_of(stream=True)
    pieces = ["He", "llo\n\n", '"\u2028\U0001f600']
    first, *rest, done = events(b"".join(map(chunks.text, pieces)) + chunks.finish(WHOLE))
    assert json.loads(first) == {
        "id": f"chatcmpl-{ID}",
        "object": "chat.completion.chunk",
        "created": 1694268190,
        "model": "m",
        "system_fingerprint": None,
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": "He"}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert done == b"[DONE]"
    said = [check(ChatCompletionChunk, each) for each in rest]
    assert [json.loads(each)["choices"][0]["delta"] for each in rest] == [
        {"content": pieces[1]},
        {"content": pieces[2]},
        {},
    ]
    assert [each.choices[0].finish_reason for each in said] == [None, None, "stop"]


@pytest.mark.parametrize("pieces", [[], ["Hi", " there"]])
def test_usage_comes_last_and_only_when_asked(pieces):
    chunks = chunks_of(stream=True, stream_options={"include_usage": True})
    stream = b"".join(map(chunks.text, pieces)) + chunks.finish(Finished(FinishReason.LENGTH, USAGE))
    *said, last, done = events(stream)
    assert done == b"[DONE]"
    assert all(json.loads(each)["usage"] is None for each in said)
    assert all(json.loads(each)["choices"] for each in said)
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    state = ChatCompletionStreamState()
    for each in (*said, last):
        state.handle_chunk(check(ChatCompletionChunk, each))
    whole = state.current_completion_snapshot
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", "".join(pieces))
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("length", 12)


def test_a_stream_that_failed_never_looks_whole():
    chunks = chunks_of(stream=True)
    _, error = events(chunks.text("He") + chunks.failed(EngineLost("the engine died; ask again")))
    assert json.loads(error) == {
        "error": {
            "message": "the engine died; ask again",
            "type": "server_error",
            "param": None,
            "code": "engine_lost",
        }
    }


def test_an_answer_in_one_piece():
    body = completion(request(), request_id=ID, created=1694268190, text="Hi \0\U0001f600", finished=WHOLE)
    said = check(ChatCompletion, body)
    assert (said.id, said.object, said.model) == (completion_id(ID), "chat.completion", "m")
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == ("Hi \0\U0001f600", "stop")
    assert said.usage.prompt_tokens_details.cached_tokens == 3


# What all HTTP clients hear ---------------------------------------------------------------


def test_error_bodies_and_headers():
    assert json.loads(error_body(BadRequest("no", param="n"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    }
    assert error_headers(BadRequest("no")) == [(b"x-should-retry", b"false")]
    assert error_headers(Internal("a bug")) == [(b"x-should-retry", b"false")]
    assert error_headers(Overloaded("full")) == [(b"retry-after", b"1"), (b"x-should-retry", b"true")]


def test_every_error_has_a_type_that_fits_its_status():
    for cls in BY_CODE.values():
        kind = json.loads(error_body(cls("x")))["error"]["type"]
        if cls.http_status == 429:
            assert kind == "rate_limit_error"
        else:
            assert kind == ("server_error" if cls.http_status >= 500 else "invalid_request_error")


def test_models():
    body = json.loads(models_body([Model("m", 1686935002, "org/m", 32768, honours_seed=False)]))
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model == {
        "object": "model", "id": "m", "created": 1686935002, "owned_by": "espalier", "root": "org/m",
        "max_model_len": 32768, "honours_seed": False,
    }  # fmt: skip
    OpenAIModel.model_validate(model, strict=True)
