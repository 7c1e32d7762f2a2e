import json
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from protocol.dialects import completions
from protocol.dialects.completions import Chunks, CompletionRequest, completion_id, parse, to_respond
from protocol.dialects.prompt import IDS_MAX
from protocol.errors import BadRequest, EngineLost, Unsupported
from protocol.messages.generation import FinishReason, Started, Usage
from protocol.messages.text import Answered, ChoiceEnded, Respond, Text, TokenText
from tests.rig.dialects import (
    check_answered_or_refused,
    check_refused,
    ended,
    events,
    extras,
    json_values,
    streamed,
    whole_body,
)

ID = "0123456789abcdef0123456789abcdef"
BASE = {"model": "m", "prompt": "Hi"}
PARAMS = {"turns": "prompt", "tokens_max": "max_tokens", "tokens_min": "min_tokens"}
WHOLE = Answered(Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3))


def request(**fields: Any) -> CompletionRequest:
    return parse(json.dumps(BASE | fields).encode())


def asked(**fields: Any) -> Respond:
    return to_respond(request(**fields), request_id=ID)


def refused(kind: type[BadRequest], param: str, sentence: str | None = None, /, **fields: Any) -> None:
    check_refused(parse, BASE | fields, kind, param, sentence)


# Requests ---------------------------------------------------------------------------------


def test_the_shortest_request_asks_for_16_tokens() -> None:
    assert asked() == Respond(ID, texts=("Hi",), tokens_max=16, params=PARAMS)


@pytest.mark.parametrize(
    ("prompt", "texts", "token_lists"),
    [
        ("", ("",), ()),
        (["a"], ("a",), ()),
        (["a", "", "b\0"], ("a", "", "b\0"), ()),
        ([1, 2, 3], (), ((1, 2, 3),)),
        ([0, 2**31 - 1], (), ((0, 2**31 - 1),)),
        ([[1], [2, 3]], (), ((1,), (2, 3))),
        (["x"] * 128, ("x",) * 128, ()),
        ([[1]] * 128, (), ((1,),) * 128),
        ([7] * 40_000, (), ((7,) * 40_000,)),
    ],
)
def test_every_kind_of_prompt_is_accepted(
    prompt: str | Sequence[str | int | list[int]], texts: tuple[str, ...], token_lists: tuple[tuple[int, ...], ...]
) -> None:
    got = asked(prompt=prompt)
    assert (got.texts, got.token_lists, got.turns) == (texts, token_lists, ())


@pytest.mark.parametrize(
    ("param", "prompt"),
    [
        ("prompt", 5),
        ("prompt", []),
        ("prompt", ["x"] * 129),
        ("prompt", [[1]] * 129),
        ("prompt[1]", ["a", 1]),
        ("prompt[0]", [None]),
        ("prompt[0]", [1.0]),
        ("prompt[1]", [1, True]),
        ("prompt[2]", [1, 2, -1]),
        ("prompt[0]", [2**31]),
        ("prompt[0]", [[]]),
        ("prompt[1]", [[1], 2]),
        ("prompt[1][2]", [[1], [2, 3, -1]]),
    ],
)
def test_an_invalid_prompt_is_refused_by_its_path(param: str, prompt: object) -> None:
    refused(BadRequest, param, prompt=prompt)


def test_without_a_prompt_a_text_begins() -> None:
    for body in ({"model": "m"}, {"model": "m", "prompt": None}):
        got = parse(json.dumps(body).encode())
        assert to_respond(got, request_id=ID) == Respond(ID, tokens_max=16, params=PARAMS)
        assert got.choices_total == 1


def test_no_token_of_an_answer_is_asked_for_by_computing_its_prompt_alone() -> None:
    assert asked(max_tokens=0) == Respond(ID, texts=("Hi",), tokens_max=1, warm_up=True, params=PARAMS)


def test_an_echo_beside_log_probabilities_asks_for_those_of_the_prompt() -> None:
    assert asked(echo=True, logprobs=0).scores_prompts
    assert not asked(echo=True).scores_prompts
    assert not asked(logprobs=1).scores_prompts


def test_the_limit_of_token_ids_is_exact() -> None:
    assert len(asked(prompt=[1] * IDS_MAX).token_lists[0]) == IDS_MAX
    refused(BadRequest, "prompt", prompt=[1] * (IDS_MAX + 1))
    refused(BadRequest, "prompt", prompt=[[1] * IDS_MAX, [1]])


@pytest.mark.parametrize(
    "body",
    [
        # sglang.bench_serving, vllm bench serve and lm-eval, as they are
        {"temperature": 0.0, "best_of": 1, "max_tokens": 16, "stream": True, "ignore_eos": True},
        {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None, "stream": True,
         "stream_options": {"include_usage": True}},
        {"prompt": [[1, 2]], "max_tokens": 16, "seed": 1234, "logprobs": 1, "stop": None, "echo": False},
        # fields that ask for nothing
        {"suffix": "", "user": "me", "n": 1, "echo": None, "logit_bias": {}, "presence_penalty": 0, "stream": False,
         "stream_options": None, "best_of": None, "max_tokens": None, "response_format": {"type": "text"}},
    ],
)  # fmt: skip
def test_bodies_of_stock_clients_are_accepted(body: dict[str, Any]) -> None:
    assert asked(**body).tokens_max == 16


def test_to_respond_maps_every_field() -> None:
    body = {
        "prompt": ["a", "b"], "max_tokens": 9, "n": 2, "best_of": 3, "logprobs": 0, "seed": 7, "min_tokens": 2,
        "logit_bias": {"5": 1}, "return_token_ids": True, "priority": 1, "cache_salt": "s", "stop": "x",
        "include_stop_str_in_output": True, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5, "stop_token_ids": [4],
        "ignore_eos": True, "ttft_target_ms": 0, "itl_target_ms": 2.5,
    }  # fmt: skip
    assert asked(**body) == Respond(
        ID, texts=("a", "b"), tokens_max=9, n=2, best_of=3, logprobs=0, seed=7, tokens_min=2, logit_bias={5: 1.0},
        token_ids=True, priority=1, cache_salt="s", stop=("x",), stop_included=True, temperature=0.0, top_p=0.5,
        top_k=3, min_p=0.1, frequency_penalty=1.0, presence_penalty=-1.0, repetition_penalty=1.5, stop_token_ids=(4,),
        ignore_eos=True, ttft_target_ms=0.0, itl_target_ms=2.5, params=PARAMS,
    )  # fmt: skip
    assert asked(prompt=[1, 2], echo=True).echo


@pytest.mark.parametrize(
    ("kind", "param", "fields"),
    [
        (Unsupported, "suffix", {"suffix": "the end"}),
        (BadRequest, "suffix", {"suffix": 5}),
        (BadRequest, "min_tokens", {"min_tokens": 1, "max_tokens": 0}),
        (Unsupported, "use_beam_search", {"use_beam_search": True}),
        (BadRequest, "best_of", {"best_of": 1, "n": 2}),
        (BadRequest, "best_of", {"best_of": 2, "stream": True}),
        (BadRequest, "min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        (BadRequest, "n", {"prompt": ["x"] * 65, "n": 2}),
        (BadRequest, "best_of", {"prompt": ["x"] * 2, "best_of": 65}),
        (BadRequest, "max_completion_tokens", {"max_completion_tokens": 5}),
        (BadRequest, "response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ],
)
def test_invalid_fields_are_refused_by_name(kind: type[BadRequest], param: str, fields: dict[str, Any]) -> None:
    refused(kind, param, **fields)


def test_the_limit_of_choices_is_exact() -> None:
    assert request(prompt=["x"] * 64, n=2).choices_total == 128
    assert asked(prompt=["x"] * 2, n=1, best_of=64).best_of == 64
    sentence = "n: 43 prompts times 3 make 129 choices; a request can have at most 128"
    refused(BadRequest, "n", sentence, prompt=["x"] * 43, n=3)


def test_best_of_equal_to_n_can_be_streamed() -> None:
    assert asked(stream=True, n=2, best_of=2).n == 2
    assert asked(n=2, best_of=3).best_of == 3


NAMES = sorted({*CompletionRequest.harmless, *(field.name for field in attrs.fields(CompletionRequest))})


@settings(deadline=None, max_examples=150)
@given(json_values | st.dictionaries(st.sampled_from(NAMES), json_values, max_size=6))
def test_any_json_is_answered_or_refused(value: object) -> None:
    check_answered_or_refused(value, BASE, parse, to_respond)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(-2, 5) | st.sampled_from([2**31, True, "x", None]) | st.lists(st.integers(-1, 3)), max_size=5)
)
def test_any_list_is_a_prompt_or_refused_by_its_path(prompt: list[Any]) -> None:
    got = outcome(prompt)
    if isinstance(got, Respond):
        flat = prompt if isinstance(prompt[0], list | str) else [prompt]
        assert [*got.texts, *map(list, got.token_lists)] == flat
    else:
        assert str(got.param).startswith("prompt")


def outcome(prompt: list[Any]) -> Respond | BadRequest:
    """Return the request with this prompt, or the error."""
    try:
        return asked(prompt=prompt)
    except BadRequest as error:
        return error


# Answers ----------------------------------------------------------------------------------


def check(text: bytes, *, streamed: bool = False, unknown: Sequence[str] = ()) -> Any:
    """Parse with the class of the `openai` package, which requires a finish reason that chunks do not have."""
    data = json.loads(text)
    for choice in data["choices"]:
        if streamed and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
    assert {*extras(Completion.model_validate(data, strict=True))} == {*unknown}
    return json.loads(text)


def lines_of(asked: CompletionRequest, *replies: Text | ChoiceEnded) -> list[bytes]:
    chunks = Chunks(asked, request_id=ID, created=1694268190)
    *lines, done = events(streamed(chunks, replies, WHOLE))
    assert done == b"[DONE]"
    return lines


def gathered(asked: CompletionRequest, *replies: Started | Text | ChoiceEnded) -> bytes:
    return whole_body(completions.Completion(asked, request_id=ID, created=1694268190), replies, WHOLE)


def test_a_complete_stream_has_its_chunks_in_order() -> None:
    first, second, last = lines_of(request(stream=True), Text("He\n\n", 1), Text('"\u2028\U0001f600', 1), ended())
    assert check(first, streamed=True) == {
        "id": f"cmpl-{ID}",
        "object": "text_completion",
        "created": 1694268190,
        "model": "m",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "He\n\n", "logprobs": None, "finish_reason": None}],
    }
    assert check(second, streamed=True)["choices"][0]["text"] == '"\u2028\U0001f600'
    assert check(last)["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]


def test_choices_are_distinguished_in_any_order() -> None:
    lines = lines_of(
        request(stream=True, prompt=["a", "b"], n=2), Text("x", 1, 3), ended(1), Text("y", 1, 0), ended(3), ended(0),
        ended(2, FinishReason.LENGTH),
    )  # fmt: skip
    choices = [check(line, streamed=True)["choices"][0] for line in lines]
    assert [(each["index"], each["text"], each["finish_reason"]) for each in choices] == [
        (3, "x", None), (1, "", "stop"), (0, "y", None), (3, "", "stop"), (0, "", "stop"), (2, "", "length"),
    ]  # fmt: skip


def test_usage_comes_last_and_only_when_asked() -> None:
    *lines, last = lines_of(request(stream=True, stream_options={"include_usage": True}), Text("x", 1), ended())
    assert all(check(line, streamed=True)["usage"] is None for line in lines)
    assert all(json.loads(line)["choices"] for line in lines)
    assert check(last)["choices"] == []
    assert check(last)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(b"usage" not in each for each in lines_of(request(stream=True), Text("x", 1), ended()))


def test_a_failed_stream_never_looks_whole() -> None:
    chunks = Chunks(request(stream=True), request_id=ID, created=1)
    _, error = events(chunks.text(Text("He", 1)) + chunks.failed(EngineLost("the engine died; ask again")))
    assert json.loads(error)["error"]["code"] == "engine_lost"
    with pytest.raises(AssertionError):
        chunks.finish(WHOLE)


SCORED = [
    Text("Hé", 2, 0, (TokenText("H", b"H", -0.5, (("H", b"H", -0.5), ("x", b"x", float("-inf")))),
                      TokenText("é", b"\xc3\xa9", -1.0, (("x", b"x", -0.5),))), (1, 2)),
    Text("é", 2, 0, (TokenText("\ufffd", b"\xc3", -2.0), TokenText("\ufffd", b"\xa9", -3.0)), (3, 4)),
    Text("o", 1, 0, (TokenText("ok", b"ok", float("nan")),), (5,)),
    Text("", 1, 0, (TokenText("<end>", b"", -4.0),), (6,)),
]  # fmt: skip
TABLES = [
    {"tokens": ["H", "é"], "token_logprobs": [-0.5, -1.0],
     "top_logprobs": [{"H": -0.5, "x": -9999.0}, {"x": -0.5, "é": -1.0}], "text_offset": [0, 1]},
    {"tokens": ["bytes:\\xc3", "bytes:\\xa9"], "token_logprobs": [-2.0, -3.0],
     "top_logprobs": [{"bytes:\\xc3": -2.0}, {"bytes:\\xa9": -3.0}], "text_offset": [2, 2]},
    {"tokens": ["ok"], "token_logprobs": [-9999.0], "top_logprobs": [{"ok": -9999.0}], "text_offset": [3]},
    {"tokens": ["<end>"], "token_logprobs": [-4.0], "top_logprobs": [{"<end>": -4.0}], "text_offset": [4]},
]  # fmt: skip


def test_log_probabilities_are_exact_for_each_delta() -> None:
    other = attrs.evolve(SCORED[0], choice=1)  # whose offsets are its own
    *lines, _, _ = lines_of(request(stream=True, logprobs=2, n=2), *SCORED, other, ended(), ended(1))
    choices = [check(line, streamed=True)["choices"][0] for line in lines]
    assert [each["logprobs"] for each in choices] == [*TABLES, TABLES[0]]


def test_log_probabilities_in_one_piece_equal_those_of_the_chunks() -> None:
    table = check(gathered(request(logprobs=2), *SCORED, ended()))["choices"][0]["logprobs"]
    assert table == {name: [each for delta in TABLES for each in delta[name]] for name in TABLES[0]}  # type: ignore[attr-defined]


def test_a_leading_space_that_was_removed_shifts_no_other_token() -> None:
    pieces = [Text("Hi", 1, 0, (TokenText(" Hi", b" Hi", -1.0),)), Text(" ho", 1, 0, (TokenText(" ho", b" ho", -1.0),))]
    table = check(gathered(request(logprobs=0), *pieces, ended()))["choices"][0]["logprobs"]
    assert table["text_offset"] == [0, 2]


def test_token_ids_are_returned_if_requested() -> None:
    *lines, last = lines_of(request(stream=True, return_token_ids=True), *SCORED, ended())
    choices = [check(line, streamed=True, unknown=["choices.token_ids"])["choices"][0] for line in lines]
    assert [(choice["token_ids"], choice["logprobs"]) for choice in choices] == [
        ([1, 2], None),
        ([3, 4], None),
        ([5], None),
        ([6], None),
    ]
    assert "token_ids" not in json.loads(last)["choices"][0]
    whole = check(gathered(request(return_token_ids=True), *SCORED, ended()), unknown=["choices.token_ids"])
    assert whole["choices"][0]["token_ids"] == [1, 2, 3, 4, 5, 6]


def test_an_answer_in_one_piece() -> None:
    replies: list[Started | Text | ChoiceEnded]
    replies = [Started(), Text("b", 1, 1), Text("a", 1), Text("c", 1, 1), ended(1, FinishReason.LENGTH), ended()]
    answer = check(gathered(request(prompt=["x", "y"]), *replies))
    assert (answer["id"], answer["object"]) == (completion_id(ID), "text_completion")
    assert answer["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "bc", "logprobs": None, "finish_reason": "length"},
    ]
    assert answer["usage"]["total_tokens"] == 12
