"""The versions of the weights stand beside the reason of each end, and only where the weights have been replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from protocol.dialects import chat, completions, responses
from protocol.dialects.weight_versions import version_fields
from protocol.messages.generation import FinishReason, Usage
from protocol.messages.text import Answered, ChoiceEnded, Text
from protocol.weight_versions import WeightVersions
from tests.rig.dialects import whole_body

ID = "0123456789abcdef0123456789abcdef"
FIRST: WeightVersions = (("default", 2),)
NAMED: WeightVersions = (("step-1", 2),)
SPLIT: WeightVersions = (("default", 1), ('step "2"', 1))
SPLIT_FIELDS = {
    "weight_version": 'step "2"',
    "weight_versions": [{"version": "default", "tokens": 1}, {"version": 'step "2"', "tokens": 1}],
}
ANSWERED = Answered(Usage(3, 4))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}


def ended(choice: int, versions: WeightVersions, reason: FinishReason = FinishReason.STOP) -> ChoiceEnded:
    return ChoiceEnded(reason, choice, weight_versions=versions)


def shown(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields about weights."""
    return {name: value for name, value in fields.items() if name.startswith("weight_")}


def test_the_first_weights_have_no_fields() -> None:
    for versions in ((), FIRST, (("", 4),), (("", 1), ("default", 1))):
        assert version_fields(versions) == {}
    assert version_fields(NAMED) == {"weight_version": "step-1"}
    assert version_fields(SPLIT) == SPLIT_FIELDS


@pytest.mark.parametrize("dialect", [chat, completions])
@pytest.mark.parametrize("ids", [False, True])
def test_each_choice_has_its_own(dialect: Any, ids: bool) -> None:
    base = CHAT if dialect is chat else COMPLETION
    request = dialect.parse(json.dumps(base | {"n": 3, "return_token_ids": ids}).encode())
    plain = [Text("a", 1, choice) for choice in range(3)]
    builder = dialect.Completion(request, request_id=ID, created=7)
    replies: list[Text | ChoiceEnded] = [*plain, ended(0, NAMED), ended(1, SPLIT), ended(2, FIRST)]
    body = whole_body(builder, replies, ANSWERED)
    answer = (ChatCompletion if dialect is chat else OpenAICompletion).model_validate_json(body)
    assert [shown(each.model_extra or {}) for each in answer.choices] == [
        {"weight_version": "step-1"},
        SPLIT_FIELDS,
        {},
    ]
    unchanged: list[Text | ChoiceEnded] = [*plain, *(ended(choice, FIRST) for choice in range(3))]
    without: list[Text | ChoiceEnded] = [*plain, *(ended(choice, ()) for choice in range(3))]
    first, second = (
        whole_body(dialect.Completion(request, request_id=ID, created=7), each, ANSWERED)
        for each in (unchanged, without)
    )
    assert first == second
    assert b"weight" not in first


@pytest.mark.parametrize("dialect", [chat, completions])
def test_a_stream_has_them_in_the_chunk_that_ends_a_choice(dialect: Any) -> None:
    base = CHAT if dialect is chat else COMPLETION
    request = dialect.parse(json.dumps(base | {"n": 2, "stream": True}).encode())
    chunks = dialect.Chunks(request, request_id=ID, created=7)
    assert b"weight" not in chunks.text(Text("a", 1, 0)) + chunks.text(Text("a", 1, 1))
    for choice, versions, expected in ((1, NAMED, {"weight_version": "step-1"}), (0, SPLIT, SPLIT_FIELDS)):
        chunk = chunks.choice_ended(ended(choice, versions)).removeprefix(b"data: ")
        parsed = (ChatCompletionChunk if dialect is chat else OpenAICompletion).model_validate_json(chunk)
        assert parsed.choices[0].finish_reason == "stop"
        assert shown(parsed.choices[0].model_extra or {}) == expected
    chunks = dialect.Chunks(request, request_id=ID, created=7)
    first = chunks.choice_ended(ended(0, FIRST))
    assert first == dialect.Chunks(request, request_id=ID, created=7).choice_ended(ended(0, ()))


@pytest.mark.parametrize("reason", FinishReason)
def test_a_response_has_them_in_itself(reason: FinishReason) -> None:
    wanted = {"model": "m", "input": "x", "store": False}
    whole = responses.parse_http(json.dumps(wanted).encode())
    for versions, expected in ((NAMED, {"weight_version": "step-1"}), (SPLIT, SPLIT_FIELDS), (FIRST, {})):
        builder = responses.Completion(whole, request_id=ID, created_at=7)
        body = whole_body(builder, [Text("a", 1), ended(0, versions, reason)], ANSWERED)
        assert shown(Response.model_validate_json(body).model_extra or {}) == expected
        events = responses.Events(whole, request_id=ID, created_at=7)
        assert b"weight" not in b"".join((*events.begin(), *events.deltas(Text("a", 1))))
        *before, last = events.finish(ended(0, versions, reason), ANSWERED.usage)
        assert b"weight" not in b"".join(before)
        assert shown(json.loads(last)["response"]) == expected
