"""The items of an answer in every order: their events, and the same items in a response that is not streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState

from protocol.dialects.responses import Events, GivenAnswer, parse_http
from protocol.dialects.responses.body import Completion
from protocol.dialects.responses.events import REPEATED_AT_ONCE_MAX
from protocol.dialects.tools import call_id
from protocol.errors import EngineLost
from protocol.messages.generation import FinishReason, Usage
from protocol.messages.text import Answered, AnswerPiece, CallPart, ChoiceEnded, Reasoning, Text, TokenText
from protocol.messages.tools import ToolCall
from tests.protocol.dialects.responses.test_events import ID, SERVER_EVENTS, check, check_response, events_of
from tests.protocol.dialects.responses.test_tools import AGENTS, WEATHER
from tests.rig.dialects import whole_body

USAGE = Usage(prompt_tokens=37, completion_tokens=11, reasoning_tokens=4)
TOOLS: dict[str, Any] = {"tools": [WEATHER, AGENTS]}

HI = [Text("He", 1), Text("llo", 1)]
THOUGHT = [Reasoning("Ol", 1), Reasoning("d?", 1)]
CALL = [CallPart(0, "weather", "", 3), CallPart(0, "", '{"city":', 2), CallPart(0, "", '"Köln"}', 2)]
CLOSING = [CallPart(1, "agents_v1__close", "{}", 5)]
ORDERS: dict[str, Sequence[AnswerPiece]] = {
    "text": HI,
    "reasoning, text": [*THOUGHT, *HI],
    "text, two calls": [*HI, *CALL, *CLOSING],
    "calls": [*CALL, *CLOSING],
    "reasoning, call": [*THOUGHT, *CALL],
    "call, text": [*CALL, *HI],
    "all, twice": [*THOUGHT, *HI, *CALL, *CLOSING, Text(" so", 1), Reasoning("Hm", 1), Text(".", 1)],
    "reasoning": THOUGHT,
    "nothing": [],
}
DELTAS = {  # of each type of item: the name of its deltas' events, and the field that has the joined text
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
}


def stream(events: Events, pieces: Sequence[AnswerPiece], reason: FinishReason = FinishReason.STOP) -> list[Any]:
    frames = [*events.begin(), *(frame for piece in pieces for frame in events.deltas(piece))]
    return [checked(frame) for frame in (*frames, *events.finish(ChoiceEnded(reason), USAGE))]


def checked(frame: bytes) -> Any:
    named = b".arguments.done" in frame or b"_arguments.done" in frame  # the package does not declare its `name`
    return check(frame, unknown=["name"] if named else [])


def text_of(item: Any) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def expected(pieces: Sequence[AnswerPiece]) -> list[tuple[str, str]]:
    """Return the type and the text of each item."""
    items: list[list[str]] = []
    last: object = None
    for piece in pieces:
        kind = piece.index if isinstance(piece, CallPart) else type(piece).__name__
        text = piece.arguments if isinstance(piece, CallPart) else piece.text
        name = {"Text": "message", "Reasoning": "reasoning"}.get(str(kind), "function_call")
        if kind == last:
            items[-1][1] += text
        else:
            items.append([name, text])
        last = kind
    return [(name, text) for name, text in items] or [("message", "")]


@pytest.mark.parametrize("order", ORDERS)
def test_each_item_begins_and_ends_before_the_next_one(order: str) -> None:
    pieces = ORDERS[order]
    sent = stream(events_of(stream_id="a", **TOOLS), pieces)
    assert [event["sequence_number"] for event in sent] == [*range(len(sent))]
    assert {event["stream_id"] for event in sent} == {"a"}
    response, of_items = sent[-1]["response"], sent[2:-1]
    assert [(item["type"], text_of(item)) for item in response["output"]] == expected(pieces)
    assert len({item["id"] for item in response["output"]}) == len(response["output"])
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    for index, item in enumerate(response["output"]):
        own = [event for event in of_items if event["output_index"] == index]
        assert own == of_items[: len(own)], "the events of an item follow each other"
        del of_items[: len(own)]
        check_item(own, item)
    assert of_items == []


def check_item(events: Sequence[Any], item: Any) -> None:
    """Check the events of one item, in their order."""
    added, *between, done = events
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert (done["item"], item["status"]) == (item, "completed")
    assert (added["item"]["id"], added["item"]["status"]) == (item["id"], "in_progress")
    kind, field = DELTAS[item["type"]]
    if item["type"] == "function_call":
        assert added["item"] == {**item, "status": "in_progress", "arguments": ""}
        whole = between.pop()
        assert whole["name"] == item["name"]
    else:
        assert (added["item"]["content"], item["content"]) == ([], [between[-1]["part"]])
        assert between.pop(0)["part"] == {**item["content"][0], "text": ""}
        assert between.pop()["type"] == "response.content_part.done"
        whole = between.pop()
        assert {event["content_index"] for event in (whole, *between)} == {0}
    assert (whole["type"], whole[field]) == (f"{kind}.done", text_of(item))
    assert "".join(event["delta"] for event in between) == text_of(item)
    assert {event["type"] for event in between} <= {f"{kind}.delta"}
    assert {event["item_id"] for event in (whole, *between)} == {item["id"]}


def test_a_call_has_the_namespace_and_the_short_name_of_its_function() -> None:
    *_, last = stream(events_of(**TOOLS), ORDERS["all, twice"])
    calls = [item for item in last["response"]["output"] if item["type"] == "function_call"]
    assert calls == [
        {
            "id": f"fc_{ID}_2",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(ID, 0, 0),
            "name": "weather",
            "arguments": '{"city":"Köln"}',
        },
        {
            "id": f"fc_{ID}_3",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(ID, 0, 1),
            "name": "close",
            "arguments": "{}",
            "namespace": "agents_v1",
        },
    ]


def test_a_name_that_no_tool_has_stays_as_the_model_gave_it() -> None:
    *_, last = stream(events_of(), [CallPart(0, "agents_v1__close", "{}", 1)])
    [call] = last["response"]["output"]
    assert (call["name"], "namespace" in call) == ("agents_v1__close", False)


@pytest.mark.parametrize("order", ORDERS)
def test_an_answer_that_is_not_streamed_has_the_same_items(order: str) -> None:
    asked = parse_http(json.dumps({"model": "m", "input": "Hi", **TOOLS}).encode())
    builder = Completion(asked, request_id=ID, created_at=1741290958)
    body = whole_body(builder, [*ORDERS[order], ChoiceEnded(FinishReason.STOP)], Answered(USAGE))
    check_response(body)
    *_, last = stream(events_of(**TOOLS), ORDERS[order])
    assert json.loads(body) == last["response"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("order", "status"), [("text", "incomplete"), ("reasoning", "incomplete"), ("text, two calls", "completed")]
)
def test_an_answer_that_was_cut_ends_in_an_incomplete_item_but_for_a_whole_call(
    order: str, status: str, streamed: bool
) -> None:
    if streamed:
        *_, last = stream(events_of(**TOOLS), ORDERS[order], FinishReason.LENGTH)
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        asked = parse_http(json.dumps({"model": "m", "input": "Hi", **TOOLS}).encode())
        builder = Completion(asked, request_id=ID, created_at=1741290958)
        body = whole_body(builder, [*ORDERS[order], ChoiceEnded(FinishReason.LENGTH)], Answered(USAGE))
        response = json.loads(body)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    *before, item = [item["status"] for item in response["output"]]
    assert (item, {*before}) == (status, {"completed"} if before else set())


@pytest.mark.parametrize(
    ("pieces", "status"),
    [(THOUGHT, "incomplete"), (CALL[:2], "incomplete"), (CALL, "completed"), ([*CALL, *HI], "incomplete")],
)
def test_the_last_item_of_a_cancelled_or_failed_response_is_incomplete(
    pieces: Sequence[AnswerPiece], status: str
) -> None:
    for end in ("cancelled", "failed"):
        events = events_of(**TOOLS)
        frames = [*events.begin(), *(frame for piece in pieces for frame in events.deltas(piece))]
        if end == "cancelled":
            *closing, last = events.cancelled(USAGE)
            assert json.loads(closing[-1])["item"]["status"] == status
        else:
            last = events.failed(EngineLost("the engine died"), USAGE)
        output = json.loads(last)["response"]["output"]
        assert output[-1]["status"] == status
        assert len(output) == sum(b"output_item.added" in frame for frame in frames)


def test_what_a_later_request_continues_has_reasoning_text_and_whole_calls() -> None:
    events = events_of(**TOOLS)
    stream(events, [*ORDERS["all, twice"], CallPart(2, "weather", '{"city"', 1), CallPart(3, "weather", "[1]", 1)])
    calls = (
        ToolCall(call_id(ID, 0, 0), "weather", '{"city":"Köln"}'),
        ToolCall(call_id(ID, 0, 1), "agents_v1__close", "{}"),
    )
    assert events.given == GivenAnswer("Hello so.", "Old?Hm", calls)


def test_the_ids_and_log_probabilities_of_tokens_stand_beside_their_texts() -> None:
    scored = (TokenText("x", b"x", -1.0),)
    fields: dict[str, Any] = {"return_token_ids": True, "include": ["message.output_text.logprobs"], **TOOLS}
    pieces: list[AnswerPiece] = [
        Reasoning("Old?", 2, 0, (*scored, *scored), (1, 2)),
        Text("x", 1, 0, scored, (3,)),
        CallPart(0, "weather", "", 1, 0, scored, (4,)),
        CallPart(0, "", "{}", 1, 0, scored, (5,)),
        Text("", 1, 0, scored, (6,)),
    ]
    events = events_of(**fields)
    frames = [*events.begin(), *(frame for piece in pieces for frame in events.deltas(piece))]
    sent = [json.loads(frame) for frame in (*frames, *events.finish(ChoiceEnded(FinishReason.STOP), USAGE))]
    deltas = [event for event in sent if event["type"].endswith(".delta")]
    assert [event["token_ids"] for event in deltas] == [[1, 2], [3], [4], [5], [6]]
    # The last token ends the call, so that no message begins with it.
    assert [item["type"] for item in sent[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]
    [done] = [event for event in sent if event["type"] == "response.output_text.done"]
    assert [each["logprob"] for each in done["logprobs"]] == [-1.0]

    asked = parse_http(json.dumps({"model": "m", "input": "Hi", **fields}).encode())
    builder = Completion(asked, request_id=ID, created_at=0)
    body = json.loads(whole_body(builder, [*pieces, ChoiceEnded(FinishReason.STOP)], Answered(USAGE)))
    [part] = body["output"][1]["content"]
    assert (part["token_ids"], len(part["logprobs"])) == ([3], 1)
    assert body["output"][0]["content"][0]["token_ids"] == [1, 2]
    assert body["output"][2]["token_ids"] == [4, 5, 6]


def test_every_event_of_a_long_answer_with_many_tools_fits_into_a_message() -> None:
    tools = [{**WEATHER, "name": f"f{number:0127}", "description": "d" * 1900} for number in range(512)]
    events = events_of(tools=tools, metadata={f"{n:064}": "\0" * 512 for n in range(16)})
    frames = [*events.begin(), *events.deltas(Text("x", 1)), *events.finish(ChoiceEnded(FinishReason.STOP), USAGE)]
    assert max(map(len, frames)) < 2**18


LONG = "oak " * (REPEATED_AT_ONCE_MAX // 4 + 1)


@pytest.mark.parametrize("sse", [False, True])
@pytest.mark.parametrize(
    "long", [[Reasoning(LONG, 1)], [Text(LONG, 1)], [CallPart(0, "weather", f'{{"a":"{LONG}"}}', 1)]]
)
@pytest.mark.parametrize("ended", [FinishReason.STOP, FinishReason.LENGTH, None])
def test_a_long_item_before_another_one_ends_with_the_last_events(
    long: list[AnswerPiece], sse: bool, ended: FinishReason | None
) -> None:
    """Its end repeats it three times: reasoning of 600 kB made a client too slow that read all the time."""
    other: AnswerPiece = (
        CallPart(1, "weather", "{}", 1) if isinstance(long[0], CallPart) else CallPart(0, "weather", "{}", 1)
    )
    pieces = [Text("Hi", 1), *long, other, Reasoning("Hm", 1)]
    events = events_of(**TOOLS, sse=sse)
    at_once = [*events.begin(), *(frame for piece in pieces for frame in events.deltas(piece))]
    assert sum(map(len, at_once)) < len(LONG) + 16_000, "the long text is sent once"
    last = events.cancelled(USAGE) if ended is None else events.finish(ChoiceEnded(ended), USAGE)
    sent = [json.loads(frame.partition(b"data: ")[2] if sse else frame) for frame in (*at_once, *last)]
    assert [event["sequence_number"] for event in sent] == [*range(len(sent))]
    if ended is not None and not sse:
        assert sent == [checked(frame) for frame in (*at_once, *last)]
    output = sent[-1]["response"]["output"]
    assert [(item["type"], text_of(item)) for item in output] == expected(pieces)
    for index, item in enumerate(output[:-1]):
        check_item([event for event in sent if event.get("output_index") == index], item)
    done = [event["output_index"] for event in sent if event["type"] == "response.output_item.done"]
    assert sorted(done) == [*range(len(output))]
    # The parser of stock clients keeps a snapshot, from which it takes each item by its place.
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in sent[:-1]:
        state.handle_event(SERVER_EVENTS[event["type"]].model_validate(event))


def test_a_response_that_fails_has_its_long_items() -> None:
    events = events_of()
    for piece in (Reasoning(LONG, 1), Text("Hi", 1)):
        events.deltas(piece)
    response = json.loads(events.failed(EngineLost("gone")))["response"]
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]
