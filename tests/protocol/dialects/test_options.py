import json
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from protocol.dialects import chat, completions, responses, tokens
from protocol.dialects.http import error_body
from protocol.dialects.options import (
    CHOICES_MAX,
    LOGIT_BIAS_MAX,
    STOP_CHARACTERS_MAX,
    STOP_TOKENS_MAX,
    STOPS_MAX,
    TOP_LOGPROBS_MAX,
)
from protocol.errors import BadRequest, RequestError
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import Respond
from tests.rig.dialects import check_refused, json_values, parse_event

ID = "0123456789abcdef0123456789abcdef"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
POSTED = {"model": "m", "input": "Hi"}
CREATE = {"type": "response.create", "model": "m", "input": "Hi"}

Row = tuple[Callable[[Any], Any], Callable[..., Respond] | None, dict[str, Any], tuple[type[Any], ...]]
DIALECTS: dict[str, Row] = {
    "chat": (chat.parse, chat.to_respond, CHAT, (chat.ChatRequest,)),
    "completions": (completions.parse, completions.to_respond, COMPLETION, (completions.CompletionRequest,)),
    "posted": (responses.parse_http, responses.to_respond, POSTED, (responses.CreateHttp,)),
    "socket": (parse_event, responses.to_respond, CREATE, (responses.Create, responses.CancelResponse)),
    "tokenize": (tokens.parse_tokenize, None, {"prompt": "Hi"}, (tokens.TokenizeRequest,)),
    "detokenize": (tokens.parse_detokenize, None, {"tokens": [1]}, (tokens.DetokenizeRequest,)),
}
ALL = ["chat", "completions", "posted", "socket"]


def respond(dialect: str, **fields: Any) -> Respond:
    parse, to_respond, base, _ = DIALECTS[dialect]
    assert to_respond is not None
    return to_respond(parse(json.dumps(base | fields)), request_id=ID)


def refused(dialect: str, param: str, kind: type[BadRequest] = BadRequest, **fields: Any) -> str:
    parse, _, base, _ = DIALECTS[dialect]
    return check_refused(parse, base | fields, kind, param)


def check_limits(dialect: str, field: str, fine: Iterable[Any], wrong: Iterable[Any]) -> None:
    for value in (*fine, None):
        respond(dialect, **{field: value})
    for value in wrong:
        refused(dialect, field, **{field: value})


# Ranges -----------------------------------------------------------------------------------

INT32 = 2**31


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(
    ("field", "fine", "wrong"),
    [
        ("temperature", [0, 0.0, 2], [-0.001, 2.001, True, "1"]),
        ("top_p", [0.001, 1], [0, 1.001, -1]),
        ("top_k", [-1, 1, INT32 - 1], [0, -2, INT32, 1.0]),
        ("min_p", [0, 1], [-0.001, 1.001]),
        ("frequency_penalty", [-2, 2], [-2.001, 2.001]),
        ("presence_penalty", [-2, 2], [-2.001, 2.001]),
        ("repetition_penalty", [0.001, 2], [0, 1e-38, 0.0009, 2.001]),
        ("logit_bias", [{}, {"0": -100, str(INT32 - 1): 100}, {str(n): 0 for n in range(LOGIT_BIAS_MAX)}],
         [[], {str(n): 0 for n in range(LOGIT_BIAS_MAX + 1)}]),
        ("stop", ["x" * STOP_CHARACTERS_MAX, [], ["x"] * STOPS_MAX], ["", ["x"] * (STOPS_MAX + 1), 5]),
        ("stop_token_ids", [[], [0, INT32 - 1], [1] * STOP_TOKENS_MAX], [[1] * (STOP_TOKENS_MAX + 1), 5]),
        ("include_stop_str_in_output", [True, False], [1, "yes"]),
        ("min_tokens", [0, 16], [-1, 1.0]),
        ("ignore_eos", [True, False], [0]),
        ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 0.5]),
        ("regex", ["a", "a" * 32768], ["", "a" * 32769, ["a"]]),
        ("ebnf", ["a", "a" * 32768], ["", "a" * 32769, {}]),
        ("structural_tag", [{}, '{"a":[]}'], ["", "[]", "{", "\ud7ff", [], 5]),
        ("return_token_ids", [True, False], [1]),
        ("priority", [-INT32, INT32 - 1], [-INT32 - 1, INT32, 1.5, True]),
        ("cache_salt", ["x", "x" * 256], ["", "x" * 257, 5]),
        ("ttft_target_ms", [0, 0.5, 200, 3_600_000], [-0.001, 3_600_001, 10**400, True, "200", []]),
        ("itl_target_ms", [0, 0.5, 20, 3_600_000], [-0.001, 3_600_001, 10**400, False, "20", {}]),
    ],
)  # fmt: skip
def test_values_at_a_limit_are_accepted_and_beyond_it_refused_by_their_field(
    dialect: str, field: str, fine: list[Any], wrong: list[Any]
) -> None:
    check_limits(dialect, field, fine, wrong)


@pytest.mark.parametrize(
    ("dialect", "field", "fine", "wrong"),
    [
        ("chat", "n", [1, CHOICES_MAX], [0, -1, CHOICES_MAX + 1, True, 1.0]),
        ("completions", "n", [1, CHOICES_MAX], [0, CHOICES_MAX + 1]),
        ("completions", "best_of", [1, CHOICES_MAX], [0, CHOICES_MAX + 1]),
        ("completions", "logprobs", [0, TOP_LOGPROBS_MAX], [-1, TOP_LOGPROBS_MAX + 1, True]),
        ("completions", "max_tokens", [0, 1, INT32 - 1], [-1, INT32]),
        ("posted", "user", ["", "x" * 512], ["x" * 513]),
    ],
)
def test_limits_of_one_dialect(dialect: str, field: str, fine: list[Any], wrong: list[Any]) -> None:
    check_limits(dialect, field, fine, wrong)


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"5": "1"}, "logit_bias.5"),
        ({"5": True}, "logit_bias.5"),
        ({"5": 100.001}, "logit_bias.5"),
        ({"5": 10**400}, "logit_bias.5"),
        ({"-1": 1}, "logit_bias.-1"),
        ({"05": 1}, "logit_bias.05"),
        ({"5\n": 1}, 'logit_bias.["5\\n"]'),
        ({"\u0665": 1}, 'logit_bias.["\u0665"]'),
        ({str(2**31): 1}, f"logit_bias.{2**31}"),
    ],
)
def test_an_invalid_logit_bias_is_refused_by_its_key(dialect: str, bias: dict[str, Any], param: str) -> None:
    refused(dialect, param.replace(".[", "["), logit_bias=bias)


# Grammars ---------------------------------------------------------------------------------

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("dialect", "fields", "grammar"),
    [
        ("chat", {"response_format": SCHEMA}, (GrammarKind.JSON_SCHEMA, '{"type":"integer"}')),
        ("completions", {"response_format": SCHEMA}, (GrammarKind.JSON_SCHEMA, '{"type":"integer"}')),
        ("chat", {"response_format": {"type": "json_object"}}, (GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
        ("posted", {"text": FORMAT}, (GrammarKind.JSON_SCHEMA, '{"type":"integer"}')),
        ("socket", {"text": {"format": {"type": "json_object"}}}, (GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
        ("socket", {"regex": "[a-z]"}, (GrammarKind.REGEX, "[a-z]")),
        ("chat", {"ebnf": "root ::= x"}, (GrammarKind.EBNF, "root ::= x")),
        ("chat", {"structural_tag": {"b": 1, "a": []}}, (GrammarKind.STRUCTURAL_TAG, '{"b":1,"a":[]}')),
        ("completions", {"structural_tag": '{ "b": 1 }'}, (GrammarKind.STRUCTURAL_TAG, '{"b":1}')),
    ],
)
def test_a_format_becomes_a_grammar_with_the_name_of_its_field(
    dialect: str, fields: dict[str, Any], grammar: tuple[GrammarKind, str]
) -> None:
    request = respond(dialect, **fields)
    assert request.grammar == Grammar(*grammar)
    name = next(iter(fields))
    assert request.params["grammar"] == ("text.format" if name == "text" else name)


@pytest.mark.parametrize("dialect", ALL)
def test_a_format_of_plain_text_is_no_grammar(dialect: str) -> None:
    own = (
        {"text": {"format": {"type": "text"}}}
        if dialect in {"posted", "socket"}
        else {"response_format": {"type": "text"}}
    )
    for fields in ({}, own):
        asked = respond(dialect, **fields)
        assert asked.grammar is None
        assert "grammar" not in asked.params
    assert respond(dialect, **own, regex="a").grammar == Grammar(GrammarKind.REGEX, "a")


@pytest.mark.parametrize(
    ("dialect", "fields", "first", "second"),
    [
        ("chat", {"response_format": SCHEMA, "regex": "a"}, "response_format", "regex"),
        ("completions", {"response_format": {"type": "json_object"}, "ebnf": "a"}, "response_format", "ebnf"),
        ("socket", {"text": FORMAT, "structural_tag": {}}, "text.format", "structural_tag"),
        ("posted", {"regex": "a", "ebnf": "b"}, "regex", "ebnf"),
    ],
)
def test_two_grammars_in_one_request_are_a_mistake_that_names_both(
    dialect: str, fields: dict[str, Any], first: str, second: str
) -> None:
    sentence = refused(dialect, second, **fields)
    assert sentence == f"{second}: cannot stand beside {first}: an answer keeps to one grammar at most"


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("field", ["regex", "ebnf", "structural_tag", "format"])
def test_a_least_length_beside_a_grammar_is_a_mistake(dialect: str, field: str) -> None:
    grammar: dict[str, Any] = {field: {} if field == "structural_tag" else "a"}
    if field == "format":
        field = "response_format" if dialect in ("chat", "completions") else "text.format"
        grammar = {"response_format": SCHEMA} if field == "response_format" else {"text": FORMAT}
    sentence = refused(dialect, "min_tokens", min_tokens=1, **grammar)
    assert sentence == f"min_tokens: cannot stand beside {field}: an answer ends where its grammar does"
    assert respond(dialect, min_tokens=0, **grammar).grammar is not None


# Hostile requests -------------------------------------------------------------------------

FIELDS = [
    (dialect, name)
    for dialect, (_, _, _, classes) in DIALECTS.items()
    for cls in classes
    for name in {*getattr(cls, "harmless", {}), *(field.name for field in attrs.fields(cls))}
]


def outcome(parse: Callable[[str], Any], data: object) -> Any:
    """Return the request that data become, or the error."""
    try:
        return parse(json.dumps(data))
    except RequestError as error:
        return error


@settings(deadline=None, max_examples=500)
@given(st.sampled_from(FIELDS), json_values)
def test_any_value_in_any_field_is_accepted_or_refused_by_its_field(where: tuple[str, str], value: object) -> None:
    dialect, name = where
    parse, to_respond, base, (cls, *_) = DIALECTS[dialect]
    result = outcome(parse, base | {name: value})
    if isinstance(result, RequestError):
        assert isinstance(result, BadRequest)
        assert str(result.param).startswith(name)
        json.loads(error_body(result))
    elif to_respond is not None and isinstance(result, cls):
        asked = to_respond(result, request_id=ID)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Respond) == asked


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_unknown_key_gets_a_hint_of_the_nearest_one(dialect: str) -> None:
    parse, _, base, (cls, *_) = DIALECTS[dialect]
    near = max((field.name for field in attrs.fields(cls)), key=len)
    with pytest.raises(BadRequest, match=f"{near}x: is not a key here; did you mean {near}"):
        parse(json.dumps(base | {near + "x": 1}))


@pytest.mark.parametrize(
    ("params", "cls"),
    [
        (chat_params.CompletionCreateParamsBase, chat.ChatRequest),
        (completion_params.CompletionCreateParamsBase, completions.CompletionRequest),
        (response_params.ResponseCreateParamsBase, responses.CreateHttp),
        (response_params.ResponseCreateParamsBase, responses.Create),
    ],
)
def test_every_field_of_the_openai_client_has_a_row(params: type[Any], cls: type[Any]) -> None:
    rows = {*cls.harmless, *(field.name for field in attrs.fields(cls))}
    assert params.__annotations__.keys() - rows == set()
