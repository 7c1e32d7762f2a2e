"""Calls and reasoning in chat completions, as OpenAI's own client reads them, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from protocol.dialects.chat import ChatRequest, Chunks, Completion, parse
from protocol.messages.generation import FinishReason, Usage
from protocol.messages.text import Answered, AnswerPiece, CallPart, ChoiceEnded, Reasoning, Text, TokenText

ID = "0123456789abcdef0123456789abcdef"
CALLS = [CallPart(0, "f", '{"a": ', 2), CallPart(0, "", '"é\\n"}', 1), CallPart(1, "g", "{}", 1)]
ORDERS: dict[str, list[AnswerPiece]] = {
    "text": [Text("An", 1), Text(" oak", 1)],
    "calls": [*CALLS],
    "text, then calls": [Text("An", 1), *CALLS],
    "reasoning, then calls": [Reasoning("Hm", 1), *CALLS],
    "reasoning, then text": [Reasoning("Hm", 1), Reasoning("m", 1), Text("An", 1)],
    "calls, then text": [*CALLS, Text("An", 1)],
}


def request(**fields: object) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse(json.dumps(body).encode())


def chunks_of(pieces: Sequence[AnswerPiece], reason: FinishReason = FinishReason.STOP, **fields: object) -> list[Any]:
    made = request(stream=True, **fields)
    chunks = Chunks(made, request_id=ID, created=0)
    data = b"".join(map(chunks.piece, pieces))
    data += b"".join(chunks.choice_ended(ChoiceEnded(reason, choice)) for choice in range(made.choices))
    data += chunks.finish(Answered(Usage(1, 2)))
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    return [ChatCompletionChunk.model_validate(json.loads(line)) for line in lines]


def joined(chunks: Sequence[Any], choice: int = 0) -> dict[str, Any]:
    """Return the message that a client makes of chunks, and its reason."""
    text, thought, reason = "", "", None
    calls = dict[int, dict[str, str]]()
    for chunk in chunks:
        [one] = chunk.choices
        if one.index != choice:
            continue
        text += one.delta.content or ""
        thought += getattr(one.delta, "reasoning_content", None) or ""
        reason = one.finish_reason or reason
        for call in one.delta.tool_calls or ():
            if call.id is not None:
                assert call.index not in calls
                assert (call.type, call.function.arguments) == ("function", "")
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments
    return {"text": text, "thought": thought, "calls": [*calls.values()], "reason": reason}


def body_of(pieces: Sequence[AnswerPiece], reason: FinishReason = FinishReason.STOP, **fields: object) -> Any:
    builder = Completion(request(**fields), request_id=ID, created=0)
    for piece in pieces:
        builder.add(piece)
    builder.add(ChoiceEnded(reason))
    body = b"".join(builder.finish(Answered(Usage(1, 4, 0, 2))).pieces())
    return ChatCompletion.model_validate(json.loads(body))


@pytest.mark.parametrize("order", ORDERS)
def test_a_stream_and_a_body_say_the_same(order: str) -> None:
    streamed, whole = joined(chunks_of(ORDERS[order])), body_of(ORDERS[order])
    [choice] = whole.choices
    calls = [{"id": call.id, **call.function.model_dump()} for call in choice.message.tool_calls or ()]
    assert streamed == {
        "text": choice.message.content or "",
        "thought": getattr(choice.message, "reasoning_content", ""),
        "calls": calls,
        "reason": choice.finish_reason,
    }
    if "calls" in order:
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("f", {"a": "é\n"}), ("g", {})]
        assert len({call["id"] for call in calls}) == 2
        assert choice.finish_reason == "tool_calls"
    if "text" not in order:
        assert choice.message.content is None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2


def test_the_first_chunk_alone_has_the_role() -> None:
    for pieces in ORDERS.values():
        roles = [chunk.choices[0].delta.role for chunk in chunks_of(pieces)]
        assert roles == ["assistant", *[None] * (len(roles) - 1)]


def test_a_cut_answer_with_calls_says_so() -> None:
    assert joined(chunks_of(CALLS, FinishReason.LENGTH))["reason"] == "length"
    assert body_of(CALLS, FinishReason.LENGTH).choices[0].finish_reason == "length"


def test_calls_of_several_choices_are_apart() -> None:
    chunks = chunks_of([CallPart(0, "g", "{}", 1, choice=1), Text("An", 1, choice=0)], n=2)
    first, second = joined(chunks, 0), joined(chunks, 1)
    assert (first["text"], first["calls"], first["reason"]) == ("An", [], "stop")
    assert [call["name"] for call in second["calls"]] == ["g"]
    assert second["reason"] == "tool_calls"
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1], "choices begin in their order"


def test_the_tokens_of_calls_and_reasoning_have_their_log_probabilities_and_ids() -> None:
    scored: dict[str, Any] = {"logprobs": (TokenText("x", b"x", -1.0),), "ids": (7,)}
    pieces: list[AnswerPiece] = [
        Reasoning("Hm", 1, 0, **scored),
        CallPart(0, "g", "{}", 1, 0, **scored),
        Text("", 1, 0, **scored),
    ]
    asked: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
    chunks = chunks_of(pieces, **asked)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert sum(len(each.content) for each in logprobs if each is not None) == 3
    assert [id_ for chunk in chunks for id_ in getattr(chunk.choices[0], "token_ids", None) or ()] == [7, 7, 7]
    whole = body_of(pieces, **asked).choices[0]
    assert len(whole.logprobs.content) == 3
    assert whole.token_ids == [7, 7, 7]
