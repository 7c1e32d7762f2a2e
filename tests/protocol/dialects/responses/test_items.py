"""Items of Responses over HTTP and over WebSocket: images and videos, reasoning, calls and their results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.dialects.responses import Create, GivenAnswer, parse_http, to_respond, turns_with_answer
from protocol.dialects.responses.items import continued
from protocol.errors import BadRequest, Unsupported
from protocol.messages.media import Detail, Media, Modality
from protocol.messages.text import Role, Turn
from protocol.messages.tools import ToolCall
from tests.rig.dialects import check_refused, parse_event

PNG = "data:image/png;base64,iVBORw0KGgo="
WEB = "https://media.example/cat.png"
TEXT = {"type": "input_text", "text": "what is this?"}
IMAGE = {"type": "input_image", "image_url": PNG, "detail": "auto"}
SEEN = Media(Modality.IMAGE, PNG, Detail.AUTO, "input[0].content[1].image_url")


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts}


def turns(*items: Any) -> tuple[Turn, ...]:
    return to_respond(parse_http(json.dumps({"model": "m", "input": items}).encode()), request_id="r").turns


def create(*items: Any) -> Create:
    event = parse_event(json.dumps({"type": "response.create", "model": "m", "input": items}))
    assert isinstance(event, Create)
    return event


def refused(kind: type[BadRequest], param: str, *items: Any, sentence: str | None = None) -> None:
    fields = {"model": "m", "input": items}
    check_refused(parse_http, fields, kind, param, sentence)
    check_refused(parse_event, {"type": "response.create", **fields}, kind, param, sentence)


def test_images_and_videos_keep_their_order_among_texts() -> None:
    video = {"type": "input_video", "video_url": "file:///srv/media/a.mp4"}
    content = (
        "what is this?",
        SEEN,
        Media(Modality.VIDEO, "file:///srv/media/a.mp4", param="input[0].content[2].video_url"),
        "what is this?",
    )
    assert turns(user(TEXT, IMAGE, video, TEXT)) == (Turn(Role.USER, content),)
    assert create(user(TEXT, IMAGE, video, TEXT)).turns() == (Turn(Role.USER, content),)


@pytest.mark.parametrize("kind", ["input_audio", "input_file", "image_url", "computer_screenshot"])
def test_audio_files_and_other_parts_are_refused_by_their_name(kind: str) -> None:
    supported = '"input_text", "output_text", "refusal", "input_image" or "input_video"'
    sentence = f'input[0].content[0].type: "{kind}" is not supported here; only {supported} is'
    refused(Unsupported, "input[0].content[0].type", user({"type": kind, "file_id": "file-1"}), sentence=sentence)


@pytest.mark.parametrize(
    ("kind", "param", "part"),
    [
        (BadRequest, "image_url", {"type": "input_image"}),
        (BadRequest, "image_url", {"type": "input_image", "image_url": {"url": PNG}}),
        (BadRequest, "image_url", {"type": "input_image", "image_url": "file:///srv/media/cat.pth"}),
        (BadRequest, "detail", {"type": "input_image", "image_url": PNG, "detail": "fine"}),
        (BadRequest, "video_url", {"type": "input_video", "video_url": "https://user@a.example/"}),
        (Unsupported, "fps", {"type": "input_video", "video_url": WEB, "fps": 2}),
    ],
)
def test_mistakes_name_their_field(kind: type[BadRequest], param: str, part: object) -> None:
    refused(kind, f"input[0].content[0].{param}", user(part))


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_the_user_can_send_images(role: str) -> None:
    sentence = f"input[1].content[1]: only messages of the user can have images and videos, not one of {role}"
    item = {"role": role, "content": [TEXT, IMAGE]}
    refused(BadRequest, "input[1].content[1]", user(TEXT), item, sentence=sentence)


def test_a_conversation_that_is_continued_counts_and_its_images_have_the_name_of_its_field() -> None:
    earlier = tuple(map(continued, create(user(TEXT, *[IMAGE] * 200)).turns()))
    assert {media.param for media in earlier[0].media} == {"previous_response_id"}
    assert continued(Turn(Role.USER, "a")) == Turn(Role.USER, "a")
    request = to_respond(create(user(TEXT, IMAGE)), request_id="r", history=earlier)
    assert [media.param for media in request.media[199:]] == ["previous_response_id", SEEN.param]
    with pytest.raises(BadRequest, match="has 257 images and videos") as raised:
        to_respond(create(user(*[IMAGE] * 57)), request_id="r", history=earlier)
    assert raised.value.param == "previous_response_id"


# Answers with calls ------------------------------------------------------------------------


def call(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": '{"a": 1}', **fields}


def output(number: int = 1, content: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": content}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts, "encrypted_content": None, **fields}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


CALLED = ToolCall("c1", "f", '{"a": 1}')
AGAIN = ToolCall("c2", "n__f", "{}")
TWICE = [call(), call(2, namespace="n", arguments="", id="fc_2", status="completed")]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([*TWICE, output()], [Turn(Role.ASSISTANT, "", calls=(CALLED, AGAIN)), Turn(Role.TOOL, "done", call_id="c1")]),
        ([said("Oak."), call()], [Turn(Role.ASSISTANT, ("Oak.",), calls=(CALLED,))]),
        ([call(), said("Oak.")], [Turn(Role.ASSISTANT, ("Oak.",), calls=(CALLED,))]),
        ([said("Oak."), call(), said(" So.")], [Turn(Role.ASSISTANT, "Oak. So.", calls=(CALLED,))]),
        (
            [thought("Old?"), said("Oak."), *TWICE],
            [Turn(Role.ASSISTANT, ("Oak.",), reasoning="Old?", calls=(CALLED, AGAIN))],
        ),
        (
            [thought("Old?"), call(), thought("Hm."), call(2, namespace="n", arguments="{}")],
            [Turn(Role.ASSISTANT, "", reasoning="Old?Hm.", calls=(CALLED, AGAIN))],
        ),
        ([said("Oak."), said("Yes.")], [Turn(Role.ASSISTANT, ("Oak.",)), Turn(Role.ASSISTANT, ("Yes.",))]),
        (
            [said("Oak."), thought("Old?"), said("Yes.")],
            [Turn(Role.ASSISTANT, ("Oak.",)), Turn(Role.ASSISTANT, ("Yes.",), reasoning="Old?")],
        ),
        (
            [call(), output(), thought("Old?"), said("Yes.")],
            [
                Turn(Role.ASSISTANT, "", calls=(CALLED,)),
                Turn(Role.TOOL, "done", call_id="c1"),
                Turn(Role.ASSISTANT, ("Yes.",), reasoning="Old?"),
            ],
        ),
        ([thought("Old?"), user(TEXT)], [Turn(Role.ASSISTANT, "", reasoning="Old?"), Turn(Role.USER, (TEXT["text"],))]),
        (
            [thought("", content=None, summary=[{"type": "summary_text", "text": "Short."}])],
            [Turn(Role.ASSISTANT, "", reasoning="Short.")],
        ),
    ],
)
def test_reasoning_a_message_and_calls_in_a_row_are_one_answer(items: list[Any], expected: list[Turn]) -> None:
    assert [*turns(*items)] == expected
    assert [*create(*items).turns()] == expected


def test_the_result_of_a_call_is_a_text_or_parts_with_images() -> None:
    image = Media(Modality.IMAGE, PNG, Detail.AUTO, "input[1].output[1].image_url")
    assert turns(call(), output(content=[TEXT, IMAGE]))[1].content == ("what is this?", image)
    assert turns(call(), output(content=""))[1].content == ""
    assert turns(call(), output(content=[]))[1].content == ()


@pytest.mark.parametrize(
    ("kind", "param", "items"),
    [
        (BadRequest, "input[0].call_id", [output()]),
        (BadRequest, "input[1].call_id", [call(2), output()]),
        (BadRequest, "input[0].call_id", [output(), call()]),
        (BadRequest, "input[0].arguments", [call(arguments="[1]")]),
        (BadRequest, "input[0].arguments", [call(arguments='{"a": ')]),
        (BadRequest, "input[0].arguments", [{**call(), "arguments": {}}]),
        (BadRequest, "input[0].name", [call(name="a b")]),
        (BadRequest, "input[0].namespace", [call(namespace="")]),
        (BadRequest, "input[1].output", [call(), {**output(), "output": None}]),
        (Unsupported, "input[1].output[0].type", [call(), output(content=[{"type": "input_file", "file_id": "x"}])]),
        (Unsupported, "input[0].encrypted_content", [thought("x", encrypted_content="gAAAA")]),
        (Unsupported, "input[0].type", [{"type": "item_reference", "id": "msg_1"}]),
        (BadRequest, "input[0].type", [{"type": 5}]),
        (BadRequest, "input[0].role", [{"role": "tool", "content": "x"}]),
    ],
)
def test_mistakes_in_calls_and_results_name_their_field(kind: type[BadRequest], param: str, items: list[Any]) -> None:
    refused(kind, param, *items)


def test_an_answer_can_go_on_with_a_message_of_the_assistant_and_with_no_call() -> None:
    body = {"model": "m", "continue_final_message": True}
    check_refused(parse_http, {**body, "input": [said("Oak."), call()]}, BadRequest, "continue_final_message")
    assert parse_http(json.dumps({**body, "input": [call(), said("Oak.")]}).encode()).continue_final_message


def test_a_conversation_that_is_continued_has_the_calls_of_its_answer() -> None:
    answer = GivenAnswer("Oak.", "Old?", (CALLED,))
    asked = create(user(TEXT))
    history = turns_with_answer(asked, answer)
    assert history[1:] == (Turn(Role.ASSISTANT, "Oak.", reasoning="Old?", calls=(CALLED,)),)
    respond = to_respond(continuing(output()), request_id="r", history=history)
    assert respond.turns == (*history, Turn(Role.TOOL, "done", call_id="c1"))
    with pytest.raises(BadRequest, match='no function_call before it has the id "c2"') as raised:
        to_respond(continuing(output(), output(2)), request_id="r", history=history)
    assert raised.value.param == "input[1].call_id"


def test_an_answer_that_goes_on_with_a_message_keeps_what_that_had() -> None:
    items = [thought("Old?"), said("Oak"), call(), said(" is")]
    asked = parse_event(
        json.dumps({"type": "response.create", "model": "m", "input": items, "continue_final_message": True})
    )
    assert isinstance(asked, Create)
    [turn] = turns_with_answer(asked, GivenAnswer(" old.", "Hm.", (AGAIN,)))
    assert turn == Turn(Role.ASSISTANT, "Oak is old.", reasoning="Old?Hm.", calls=(CALLED, AGAIN))


def continuing(*items: Any) -> Create:
    fields = {"type": "response.create", "model": "m", "input": items, "previous_response_id": "resp_1"}
    event = parse_event(json.dumps(fields))
    assert isinstance(event, Create)
    return event
