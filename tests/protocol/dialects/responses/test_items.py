"""Items of Responses with images and videos, over HTTP and over WebSocket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.dialects.responses import Create, parse_http, to_respond
from protocol.dialects.responses.items import continued
from protocol.errors import BadRequest, Unsupported
from protocol.messages.media import Detail, Media, Modality
from protocol.messages.text import Role, Turn
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
