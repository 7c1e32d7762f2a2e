import json
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import responses_server_event
from openai.types.responses.response import Response

from protocol.dialects.responses import LOGPROBS, Completion, Events, error_event, parse_http, response_id
from protocol.dialects.responses.events import LOGPROBS_A_DELTA_MAX, LOGPROBS_REPEATED_MAX
from protocol.dialects.responses.objects import FORMAT_ECHOED_MAX
from protocol.errors import BadRequest, ContextTooLong, EngineLost, Overloaded
from protocol.messages.generation import FinishReason, Usage
from protocol.messages.text import Answered, ChoiceEnded, Text, TokenText
from tests.protocol.dialects.responses.test_requests import create
from tests.rig.dialects import LISTED, SCORED, extras, response_event_types, whole_body

ID = "0123456789abcdef0123456789abcdef"
USAGE = Usage(prompt_tokens=37, completion_tokens=11, cached_tokens=5)

SERVER_EVENTS = {
    get_args(cls.model_fields["type"].annotation)[0]: cls
    for cls in get_args(get_args(responses_server_event.ResponsesServerEvent)[0])
}


def check(frame: bytes | str, *, unknown: Sequence[str] = ()) -> Any:
    """Parse an event with its class of the `openai` package, which must declare every key."""
    event = json.loads(frame)
    model = SERVER_EVENTS[event["type"]].model_validate(event, strict=True)
    undeclared = {"response.store"}  # OpenAI sends it, but its package does not declare it
    assert {*extras(model)} - undeclared == {*unknown}
    return event


def check_error(frame: bytes) -> bytes:
    check(frame, unknown=["headers"] if b'"headers"' in frame else [])
    return frame


def events_of(*, sse: bool = False, **fields: Any) -> Events:
    return Events(create(**fields), request_id=ID, created_at=1741290958, sse=sse)


def begun(**fields: Any) -> Events:
    """Return the events of a response whose text may follow."""
    events = events_of(**fields)
    events.begin()
    events.open()
    return events


def deltas(events: Events, *texts: str) -> list[bytes]:
    return [events.delta(Text(text, 1)) for text in texts]


def finish(events: Events, reason: FinishReason = FinishReason.STOP) -> tuple[bytes, ...]:
    return events.finish(ChoiceEnded(reason), USAGE)


def whole_stream(events: Events, *texts: str, reason: FinishReason = FinishReason.STOP) -> list[bytes]:
    return [*events.begin(), *events.open(), *deltas(events, *texts), *finish(events, reason)]


def test_a_complete_response_has_its_events_in_order() -> None:
    events = events_of(stream_id="main", max_output_tokens=9, metadata={"a": "b"}, instructions="short")
    pieces = ["Hi", ' "there"\n', "", "\0\u2028é\U0001f600"]
    frames = whole_stream(events, *pieces)
    sent = [check(frame) for frame in frames]
    assert [event["type"] for event in sent] == response_event_types(4)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert {event["stream_id"] for event in sent} == {"main"}
    assert [event["delta"] for event in sent[4:8]] == pieces
    text = "".join(pieces)
    assert (
        events.given.text
        == sent[8]["text"]
        == sent[9]["part"]["text"]
        == sent[10]["item"]["content"][0]["text"]
        == text
    )
    assert {event["item_id"] for event in sent if "item_id" in event} == {f"msg_{ID}"}
    for event in (sent[0], sent[1], sent[11]):
        assert event["response"]["id"] == events.id == response_id(ID) == f"resp_{ID}"
        assert (event["response"]["metadata"], event["response"]["instructions"]) == ({"a": "b"}, "short")
    response = sent[11]["response"]
    assert (response["status"], response["incomplete_details"], response["error"]) == ("completed", None, None)
    assert response["output"] == [sent[10]["item"]]
    assert response["usage"] == {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 11,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 48,
    }


def test_an_answer_that_reached_its_limit_is_incomplete() -> None:
    *_, item, last = map(check, whole_stream(events_of(), "x", reason=FinishReason.LENGTH))
    assert item["item"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["usage"]["output_tokens"] == 11


def test_a_response_without_text_has_all_events() -> None:
    events = events_of()
    sent = [check(frame) for frame in [*events.begin(), *finish(events)]]
    assert [event["sequence_number"] for event in sent] == list(range(8))
    assert sent[2]["type"] == "response.output_item.added"
    assert sent[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_response_can_be_cancelled_before_and_after_its_first_token() -> None:
    events = events_of()
    (_, _, last) = [*events.begin(), *events.cancelled()]
    response = json.loads(last)["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "cancelled"})
    assert (response["output"], response["usage"]) == ([], None)

    events = events_of(stream_id="a")
    *frames, last = [*events.begin(), *events.open(), *deltas(events, "He"), *events.cancelled(USAGE)]
    assert [check(frame)["type"] for frame in frames[-2:]] == [
        "response.content_part.done",
        "response.output_item.done",
    ]
    check(last.replace(b'"reason":"cancelled"', b'"reason":"content_filter"'))  # a reason that OpenAI does not have
    event = json.loads(last)
    assert event["type"] == "response.incomplete"
    assert event["response"]["output"][0]["content"][0]["text"] == "He"
    assert event["response"]["usage"]["total_tokens"] == 48


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (EngineLost("the engine died; ask again"), "server_error", "engine_lost"),
        (ContextTooLong("too long", param="input"), "invalid_prompt", "context_length_exceeded"),
    ],
)
def test_a_failed_response_is_marked_incomplete(error: EngineLost | ContextTooLong, code: str, cause: str) -> None:
    events = events_of(stream_id="a")
    events.begin()
    early = check(events_of().failed(error), unknown=["response.error.cause"])
    assert early["response"]["output"] == []
    events.open()
    deltas(events, "He")
    event = check(events.failed(error, USAGE), unknown=["response.error.cause"])
    assert (event["type"], event["sequence_number"], event["stream_id"]) == ("response.failed", 5, "a")
    assert event["response"]["status"] == "failed"
    assert event["response"]["output"][0]["status"] == "incomplete"
    details = event["response"]["error"]
    assert (details["code"], details["cause"], details["message"], details["param"]) == (
        code,
        cause,
        str(error),
        error.param,
    )


def test_error_events_have_the_error_and_the_stream_id() -> None:
    assert json.loads(check_error(error_event(BadRequest("no", param="input[0].role"), "main"))) == {
        "type": "error",
        "status": 400,
        "stream_id": "main",
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "input[0].role",
            "code": "invalid_request",
        },
    }
    assert json.loads(check_error(error_event(Overloaded("full")))) == {
        "type": "error",
        "status": 503,
        "error": {"message": "full", "type": "server_error", "param": None, "code": "overloaded"},
        "headers": {"retry-after": "1"},
    }


# Beyond plain text ------------------------------------------------------------------------


def bare(frame: bytes) -> str:
    """Return an event without the bytes of tokens, which the `openai` package does not declare for deltas."""
    event = json.loads(frame)
    for token in event.get("logprobs", ()):
        for each in (token, *token["top_logprobs"]):
            del each["bytes"]
    return json.dumps(event)


def test_log_probabilities_are_exact_for_each_delta_and_repeated_at_the_end() -> None:
    events = events_of(include=[LOGPROBS], top_logprobs=1, stream_id="a")
    frames = [*events.begin(), *events.open(), *map(events.delta, SCORED), *finish(events)]
    for frame in frames:
        check(bare(frame))
    pieces = [json.loads(frame) for frame in frames[4:7]]
    done, part, item, last = (json.loads(frame) for frame in frames[7:])
    assert [(each["delta"], each["logprobs"]) for each in pieces] == [("He", LISTED[:1]), ("é", LISTED[1:]), ("", [])]
    assert done["logprobs"] == LISTED
    assert part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == []
    assert last["response"]["top_logprobs"] == 1
    assert last["response"]["output"][0]["content"][0]["logprobs"] == []


def test_text_with_many_log_probabilities_is_sent_in_several_deltas() -> None:
    top = tuple((f" {'x' * 100}{i}", b" " + b"x" * 100 + b"%d" % i, -3.2345678901234567) for i in range(20))
    scored = [TokenText(c, c.encode(), -1.0, top) for c in "ab" * 511] + [
        TokenText("\ufffd", b"\xc3", -1.0, top), TokenText("\ufffd", b"\xa9!", -1.0, top)]  # fmt: skip
    text = Text("ab" * 511 + "é!", 1024, 0, tuple(scored), tuple(range(1024)))
    events = begun(include=[LOGPROBS], top_logprobs=20, return_token_ids=True)
    frames = events.deltas(text)
    sent = [json.loads(frame) for frame in frames]
    assert max(map(len, frames)) < 2**20
    assert [each["sequence_number"] for each in sent] == [*range(4, 4 + len(sent))]
    assert "".join(each["delta"] for each in sent) == text.text == events.given.text
    assert sent[0]["delta"] == "ab" * (LOGPROBS_A_DELTA_MAX // 2)
    assert [token["logprob"] for each in sent for token in each["logprobs"]] == [-1.0] * 1024
    assert [bytes(token["bytes"]) for each in sent for token in each["logprobs"]] == [each.data for each in scored]
    assert [token for each in sent for token in each["token_ids"]] == [*range(1024)]


@pytest.mark.parametrize("size", [1, LOGPROBS_A_DELTA_MAX + 1])
def test_the_first_text_brings_the_events_that_open_its_item(size: int) -> None:
    text = Text("x" * size, size, 0, SCORED[0].logprobs[:1] * size)
    events, opened = events_of(include=[LOGPROBS]), begun(include=[LOGPROBS])
    first, again = events_of(include=[LOGPROBS]), Text("y", 1)
    begin = first.begin()
    assert [*events.begin(), *events.deltas(text)] == [*begin, *first.open(), *opened.deltas(text)]
    assert events.deltas(again) == opened.deltas(again)


@pytest.mark.parametrize("too_many", [False, True])
def test_long_log_probabilities_are_not_repeated_at_the_end(too_many: bool) -> None:
    events = begun(include=[LOGPROBS])
    size = len(json.dumps(LISTED[1], separators=(",", ":"), ensure_ascii=False).encode())
    for _ in range(LOGPROBS_REPEATED_MAX // size + too_many):
        frame = events.delta(Text("x", 1, 0, SCORED[1].logprobs[:1]))
        assert json.loads(frame)["logprobs"] == LISTED[1:2]
    done, *_ = finish(events)
    assert len(json.loads(done)["logprobs"]) == (0 if too_many else LOGPROBS_REPEATED_MAX // size)
    assert len(done) < 2**20


def test_token_ids_are_returned_if_requested() -> None:
    events = begun(return_token_ids=True)
    pieces = [check(events.delta(text), unknown=["token_ids"]) for text in SCORED]
    assert [(piece["token_ids"], piece["logprobs"]) for piece in pieces] == [([7], []), ([8, 9], []), ([10], [])]


def test_a_warm_up_is_a_whole_response_without_output() -> None:
    events = events_of(generate=False, stream_id="a")
    frames = [*events.begin(), *finish(events, FinishReason.LENGTH)]
    sent = [check(frame) for frame in frames]
    assert [each["type"] for each in sent] == ["response.created", "response.in_progress", "response.completed"]
    response = sent[-1]["response"]
    assert (response["status"], response["output"], events.given.text) == ("completed", [], "")
    assert response["usage"]["input_tokens"] == 37


def test_events_over_http_are_those_over_websocket() -> None:
    for frame, event in zip(
        whole_stream(events_of(), "a\n\n", "b"), whole_stream(events_of(sse=True), "a\n\n", "b"), strict=True
    ):
        name = json.loads(frame)["type"].encode()
        assert event == b"event: " + name + b"\ndata: " + frame + b"\n\n"
    failed = events_of(sse=True).failed(EngineLost("the engine died"))
    assert failed.startswith(b"event: response.failed\ndata: {")


def test_the_fields_of_the_request_are_repeated() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"type": "json_schema", "name": "x", "description": None, "schema": schema, "strict": True}
    events = events_of(user="u", safety_identifier="s", metadata={"a": "b"}, truncation="auto", service_tier="auto",
                       text={"format": wanted})  # fmt: skip
    response = check(events.begin()[0])["response"]
    assert response["text"] == {"format": wanted}
    assert {name: response[name] for name in ("user", "safety_identifier", "metadata", "truncation")} == {
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "truncation": "auto",
    }  # fmt: skip
    assert response["service_tier"] == "default"
    plain = check(events_of(text={"format": {"type": "json_object"}}).begin()[0])["response"]
    assert plain["text"] == {"format": {"type": "json_object"}}


@pytest.mark.parametrize("field", ["schema", "description"])
def test_a_long_format_is_not_repeated(field: str) -> None:
    long = {"type": "json_schema", "name": "x", "schema": {"enum": ["y"]}, "strict": None}
    long |= {"schema": {"enum": ["y" * FORMAT_ECHOED_MAX]}} if field == "schema" else {"description": "y" * 500_000}
    frames = whole_stream(events_of(text={"format": long}), "z")
    assert max(map(len, frames)) < 2000
    assert check(frames[0])["response"]["text"]["format"]["schema"] == {}


def test_the_largest_request_keeps_every_event_small() -> None:
    events = events_of(
        model="\0" * 256, instructions="\0" * 1024, previous_response_id="\0" * 256, user="\0" * 512,
        safety_identifier="\0" * 512, metadata={f"{n:064}": "\0" * 512 for n in range(16)},
        text={"format": {"type": "json_schema", "name": "x" * 64, "schema": {"a": "\0" * 2700}}},
    )  # fmt: skip
    frames = whole_stream(events, "z")
    assert max(map(len, frames)) < 2**18


# In one piece -----------------------------------------------------------------------------


def posted(*replies: Text | ChoiceEnded, **fields: Any) -> bytes:
    asked = parse_http(json.dumps({"model": "m", "input": "Hi"} | fields).encode())
    return whole_body(Completion(asked, request_id=ID, created_at=1741290958), replies, Answered(USAGE))


def check_response(body: bytes) -> Response:
    model = OpenAIResponse.model_validate(json.loads(body), strict=True)
    assert {*extras(model)} <= {"store"}
    return model


def test_an_answer_in_one_piece_is_the_response_of_the_last_event() -> None:
    response = check_response(posted(Text("He", 1), Text("llo", 1), ChoiceEnded(FinishReason.STOP)))
    assert (response.id, response.status, response.output_text) == (f"resp_{ID}", "completed", "Hello")
    *_, last = whole_stream(events_of(), "He", "llo")
    assert json.loads(posted(Text("Hello", 2), ChoiceEnded(FinishReason.STOP))) == json.loads(last)["response"]


def test_an_answer_in_one_piece_has_all_its_log_probabilities_and_token_ids() -> None:
    response = check_response(posted(*SCORED, ChoiceEnded(FinishReason.STOP), include=[LOGPROBS]))
    assert response.model_dump()["output"][0]["content"][0]["logprobs"] == LISTED
    body = json.loads(posted(*SCORED, ChoiceEnded(FinishReason.STOP), return_token_ids=True))
    assert body["output"][0]["content"][0]["token_ids"] == [7, 8, 9, 10]
