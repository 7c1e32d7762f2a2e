import json
from typing import Any, TypeVar

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from protocol.dialects.chat import ChatRequest, Chunks, Completion, completion_id, parse
from protocol.errors import EngineLost
from protocol.messages.generation import FinishReason, Started, Usage
from protocol.messages.text import Answered, ChoiceEnded, Text
from tests.rig.dialects import LISTED, SCORED, ended, events, extras, streamed, whole_body

ID = "0123456789abcdef0123456789abcdef"
BASE = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3)
WHOLE = Answered(USAGE)
Reply = Text | ChoiceEnded
M = TypeVar("M", bound=BaseModel)


def request(**fields: Any) -> ChatRequest:
    return parse(json.dumps(BASE | fields).encode())


def check(cls: type[M], text: bytes) -> M:
    """Parse with the class of the `openai` package, which must declare every key."""
    model = cls.model_validate(json.loads(text), strict=True)
    assert list(extras(model)) == []
    return model


def chunks_of(**fields: dict[Any, Any] | int) -> Chunks:
    return Chunks(request(**fields), request_id=ID, created=1694268190)


def test_a_complete_stream_has_its_chunks_in_order() -> None:
    pieces = ["He", "llo\n\n", '"\u2028\U0001f600']
    replies: list[Reply] = [*(Text(piece, 1) for piece in pieces), ended()]
    first, *rest, done = events(streamed(chunks_of(stream=True), replies, WHOLE))
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
    chunks_sent = [check(ChatCompletionChunk, each) for each in rest]
    assert [json.loads(each)["choices"][0]["delta"] for each in rest] == [
        {"content": pieces[1]},
        {"content": pieces[2]},
        {},
    ]
    assert [each.choices[0].finish_reason for each in chunks_sent] == [None, None, "stop"]


def test_a_plain_chunk_is_the_text_between_two_constant_parts_once_its_choice_has_begun() -> None:
    chunks = chunks_of(stream=True)
    assert chunks.around_text() is None
    chunks.text(Text("He", 1))
    assert (around := chunks.around_text()) is not None
    assert b'"llo"'.join(around) == chunks.text(Text("llo", 1))


@pytest.mark.parametrize("more", [{"logprobs": True}, {"return_token_ids": True}])
def test_a_chunk_with_more_than_text_has_no_constant_parts(more: dict[Any, Any]) -> None:
    chunks = chunks_of(stream=True, **more)
    chunks.text(Text("He", 1))
    assert chunks.around_text() is None


@pytest.mark.parametrize("pieces", [[], ["Hi", " there"]])
def test_usage_comes_last_and_only_when_asked(pieces: list[str]) -> None:
    chunks = chunks_of(stream=True, stream_options={"include_usage": True})
    replies: list[Reply] = [*(Text(piece, 1) for piece in pieces), ended(reason=FinishReason.LENGTH)]
    *chunks_sent, last, done = events(streamed(chunks, replies, WHOLE))
    assert done == b"[DONE]"
    assert all(json.loads(each)["usage"] is None for each in chunks_sent)
    assert all(json.loads(each)["choices"] for each in chunks_sent)
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    state = ChatCompletionStreamState()
    for each in (*chunks_sent, last):
        state.handle_chunk(check(ChatCompletionChunk, each))
    whole = state.current_completion_snapshot
    assert whole.usage is not None
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", "".join(pieces))
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("length", 12)


def test_every_choice_has_its_role_once_and_the_choices_begin_in_their_order() -> None:
    replies: list[Reply]
    replies = [Text("a", 1, 1), Text("b", 1, 0), Text("c", 1, 1), ended(2), ended(1, FinishReason.LENGTH), ended(0)]
    *chunks_sent, _ = events(streamed(chunks_of(stream=True, n=3), replies, WHOLE))
    choices = [json.loads(each)["choices"][0] for each in chunks_sent]
    assert [(each["index"], each["delta"]) for each in choices] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": "a"}),
        (0, {"content": "b"}),
        (1, {"content": "c"}),
        (2, {"role": "assistant", "content": ""}),
        (1, {}),
        (0, {}),
    ]
    state = ChatCompletionStreamState()
    for each in chunks_sent:
        state.handle_chunk(check(ChatCompletionChunk, each))
    whole = state.current_completion_snapshot.choices
    assert {each.index: (each.message.content, each.finish_reason) for each in whole} == {
        0: ("b", "stop"),
        1: ("ac", "length"),
        2: ("", "stop"),
    }


def test_log_probabilities_are_exact_for_each_delta() -> None:
    *chunks_sent, _ = events(streamed(chunks_of(stream=True, logprobs=True, top_logprobs=2), [*SCORED, ended()], WHOLE))
    for each in chunks_sent:
        check(ChatCompletionChunk, each)
    listed = [json.loads(each)["choices"][0]["logprobs"] for each in chunks_sent]
    assert listed == [
        {"content": LISTED[:1], "refusal": None},
        {"content": LISTED[1:], "refusal": None},
        {"content": [], "refusal": None},
        None,
    ]


def test_token_ids_are_returned_if_requested() -> None:
    *chunks_sent, last, _ = events(streamed(chunks_of(stream=True, return_token_ids=True), [*SCORED, ended()], WHOLE))
    assert [json.loads(each)["choices"][0]["token_ids"] for each in chunks_sent] == [[7], [8, 9], [10]]
    assert all(json.loads(each)["choices"][0]["logprobs"] is None for each in chunks_sent)
    assert "token_ids" not in json.loads(last)["choices"][0]


def test_a_failed_stream_never_looks_whole() -> None:
    chunks = chunks_of(stream=True)
    _, error = events(chunks.text(Text("He", 1)) + chunks.failed(EngineLost("the engine died; ask again")))
    assert json.loads(error) == {
        "error": {"message": "the engine died; ask again", "type": "server_error", "param": None, "code": "engine_lost"}
    }


def gathered(asked: ChatRequest, *replies: Started | Text | ChoiceEnded) -> bytes:
    return whole_body(Completion(asked, request_id=ID, created=1694268190), replies, WHOLE)


def test_an_answer_in_one_piece() -> None:
    body = gathered(request(), Started(), Text("Hi ", 1), Text("\0\U0001f600", 1), ended())
    answer = check(ChatCompletion, body)
    assert (answer.id, answer.object, answer.model) == (completion_id(ID), "chat.completion", "m")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hi \0\U0001f600", "stop")
    assert answer.choices[0].logprobs is None
    assert answer.model_dump()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert b"token_ids" not in body


def test_several_choices_in_one_piece() -> None:
    replies: list[Reply] = [ended(1, FinishReason.LENGTH), *SCORED, ended()]
    asked = request(n=2, logprobs=True)
    answer = check(ChatCompletion, gathered(asked, *replies))
    assert [(each.index, each.message.content, each.finish_reason) for each in answer.choices] == [
        (0, "He\u00e9", "stop"),
        (1, "", "length"),
    ]
    assert [each["logprobs"]["content"] for each in answer.model_dump()["choices"]] == [LISTED, []]
    ids = gathered(request(n=2, return_token_ids=True), *replies)
    assert [each["token_ids"] for each in json.loads(ids)["choices"]] == [[7, 8, 9, 10], []]
