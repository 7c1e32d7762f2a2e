import json
from typing import get_args

import pytest
from openai.types.responses import responses_server_event
from pydantic import BaseModel

from protocol.dialects.responses import Events, error_event, parse, response_id
from protocol.errors import BadRequest, ContextTooLong, EngineLost, Overloaded
from protocol.messages import Finished, FinishReason, Usage

ID = "0123456789abcdef0123456789abcdef"
BASE = {"type": "response.create", "model": "m", "input": "Hi"}
USAGE = Usage(prompt_tokens=37, completion_tokens=11, cached_tokens=5)

SERVER_EVENTS = {
    get_args(cls.model_fields["type"].annotation)[0]: cls
    for cls in get_args(get_args(responses_server_event.ResponsesServerEvent)[0])
}


def extras(model):
    """Every key that openai's types do not know."""
    for name, value in dict(model).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from (f"{name}.{key}" for key in extras(each))
    yield from model.model_extra or ()


def check(frame, *, unknown=()):
    """Parse an event with openai's own class for it, which must know every key."""
    event = json.loads(frame)
    model = SERVER_EVENTS[event["type"]].model_validate(event, strict=True)
    known_from_the_wire = {"response.store"}  # what openai sends, and its types forget
    assert {*extras(model)} - known_from_the_wire == {*unknown}
    return event


def check_error(frame):
    check(frame, unknown=["headers"] if b'"headers"' in frame else [])
    return frame


def events_of(**fields):
    return Events(parse(json.dumps(BASE | fields)), request_id=ID, created_at=1741290958)


def finished(reason=FinishReason.STOP):
    return Finished(reason, USAGE)


def test_one_whole_response():
    events = events_of(stream_id="main", max_output_tokens=9, metadata={"a": "b"}, instructions="short")
    pieces = ["Hi", ' "there"\n', "", "\0\u2028é\U0001f600"]
    frames = [*events.begin(), *events.open(), *map(events.delta, pieces), *events.finish(finished())]
    said = [check(frame) for frame in frames]
    assert [event["type"] for event in said] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    assert {event["stream_id"] for event in said} == {"main"}
    assert [event["delta"] for event in said[4:8]] == pieces
    text = "".join(pieces)
    assert events.text == said[8]["text"] == said[9]["part"]["text"] == said[10]["item"]["content"][0]["text"] == text
    assert {event["item_id"] for event in said if "item_id" in event} == {f"msg_{ID}"}
    for event in (said[0], said[1], said[11]):
        assert event["response"]["id"] == events.id == response_id(ID) == f"resp_{ID}"
        assert (event["response"]["metadata"], event["response"]["instructions"]) == ({"a": "b"}, "short")
    response = said[11]["response"]
    assert (response["status"], response["incomplete_details"], response["error"]) == ("completed", None, None)
    assert response["output"] == [said[10]["item"]]
    assert response["usage"] == {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 11,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 48,
    }


def test_no_stream_id_is_made_up():
    events = events_of()
    frames = [*events.begin(), *events.open(), events.delta("x"), *events.finish(finished())]
    assert all("stream_id" not in check(frame) for frame in frames)
    assert "stream_id" not in json.loads(error_event(Overloaded("full")))


def test_an_answer_that_reached_its_limit_is_incomplete():
    events = events_of()
    *_, item, last = map(
        check, [*events.begin(), *events.open(), events.delta("x"), *events.finish(finished(FinishReason.LENGTH))]
    )
    assert item["item"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["usage"]["output_tokens"] == 11


def test_an_answer_without_text_is_whole_all_the_same():
    events = events_of()
    said = [check(frame) for frame in [*events.begin(), *events.finish(finished())]]
    assert [event["sequence_number"] for event in said] == list(range(8))
    assert said[2]["type"] == "response.output_item.added"
    assert said[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_cancelled_before_and_after_the_first_token():
    events = events_of()
    (_, _, last) = [*events.begin(), *events.cancelled()]
    response = json.loads(last)["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "cancelled"})
    assert (response["output"], response["usage"]) == ([], None)

    events = events_of(stream_id="a")
    *frames, last = [*events.begin(), *events.open(), events.delta("He"), *events.cancelled(USAGE)]
    assert [check(frame)["type"] for frame in frames[-2:]] == [
        "response.content_part.done",
        "response.output_item.done",
    ]
    check(last.replace(b'"reason":"cancelled"', b'"reason":"content_filter"'))  # the one word that openai lacks
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
def test_a_response_that_failed(error, code, cause):
    events = events_of(stream_id="a")
    events.begin()
    early = check(events_of().failed(error), unknown=["response.error.cause"])
    assert early["response"]["output"] == []
    events.open()
    events.delta("He")
    event = check(events.failed(error, USAGE), unknown=["response.error.cause"])
    assert (event["type"], event["sequence_number"], event["stream_id"]) == ("response.failed", 5, "a")
    assert event["response"]["status"] == "failed"
    assert event["response"]["output"][0]["status"] == "incomplete"
    said = event["response"]["error"]
    assert (said["code"], said["cause"], said["message"], said["param"]) == (code, cause, str(error), error.param)


def test_long_instructions_are_not_echoed():
    events = events_of(instructions="x" * 500_000, input="y" * 500_000)
    frames = [*events.begin(), *events.open(), events.delta("z"), *events.finish(finished())]
    assert max(map(len, frames)) < 2000


def test_error_events():
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
