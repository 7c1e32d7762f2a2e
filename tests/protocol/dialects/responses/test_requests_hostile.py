import json

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.dialects.responses import Create, CreateHttp, error_event, parse_http, to_respond
from protocol.errors import BadRequest, RequestError, Unsupported
from protocol.messages.text import Respond, Role, Turn
from tests.protocol.dialects.responses.test_requests import BASE, ID, create, refused
from tests.rig.dialects import json_values, parse_event


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("null", "expected a JSON object"),
        ('{"type":"response.create","temperature":NaN}', "not JSON"),
        ('{"type":"response.create","temperature":1e999}', "not JSON"),
        ('{"type":"response.create","seed":' + "9" * 5000 + "}", "not JSON"),
        ('{"a":' + "[" * 10_000, "nested too deeply"),
        ('{"a":' * 100_000, "more than 32768 lists, objects and keys"),
        ('{"type":"response.create","model":"m","input":"\\ud800"}', "surrogate"),
        ('{"\\ud800 and more":1}', "surrogate"),
        ('{"type":"response.create","model":"m","input":"\ud800"}', "UTF-8"),
        ('{"type":"response.create","model":"m","input":"\x00"}', "not JSON"),
    ],
)
def test_text_that_is_not_valid_json_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse_event(text)


def test_depth_below_the_limit_is_refused_by_name() -> None:
    deep = "[" * 500 + "]" * 500
    for field, kind in (
        ("prompt", Unsupported),
        ("tools", BadRequest),
        ("input", BadRequest),
        ("metadata", BadRequest),
        ("xyz", BadRequest),
    ):
        with pytest.raises(BadRequest) as raised:
            parse_event(json.dumps(BASE | {field: None}).replace("null", deep))
        assert type(raised.value) is kind
        assert str(raised.value.param).startswith(field)


def test_the_last_value_of_a_repeated_key_counts() -> None:
    request = parse_event('{"type":"response.create","model":"a","input":"x","model":"b"}')
    assert isinstance(request, Create)
    assert request.model == "b"


def test_nul_is_valid_in_texts_alone() -> None:
    assert create(input="a\0b").turns() == (Turn(Role.USER, "a\0b"),)
    refused(BadRequest, "stream_id", stream_id="a\0")
    refused(BadRequest, '["model\\u0000"]', **{"model\0": 1})


NAMES = sorted({*Create.harmless, *(field.name for field in (*attrs.fields(Create), *attrs.fields(CreateHttp)))})
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]) | json_values},
        optional={
            "type": st.sampled_from(["message", "reasoning"]) | json_values,
            "content": st.lists(
                st.fixed_dictionaries({"type": st.sampled_from(["input_text"]) | json_values, "text": json_values}),
                max_size=3,
            )
            | json_values,
        },
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=150)
@given(json_values | st.dictionaries(st.sampled_from(NAMES), json_values | ITEMS, max_size=6))
def test_any_json_is_answered_or_refused(value: object) -> None:
    for data in (value, BASE | value if isinstance(value, dict) else value):
        try:
            posted = parse_http(json.dumps(data).encode())
        except RequestError as error:
            json.loads(error_event(error))
        else:
            to_respond(posted, request_id=ID)
        try:
            result = parse_event(json.dumps(data))
        except RequestError as error:
            json.loads(error_event(error))
        else:
            if isinstance(result, Create):
                respond = to_respond(result, request_id=ID)
                assert msgspec.msgpack.decode(msgspec.msgpack.encode(respond), type=Respond) == respond
