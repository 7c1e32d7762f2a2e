"""Messages of chat completions with images and videos."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.dialects.chat import parse, to_respond
from protocol.errors import BadRequest, RequestError, Unsupported
from protocol.messages.media import Detail, Media, Modality
from protocol.messages.text import Respond, Role, Turn
from tests.rig.dialects import check_refused
from tests.rig.stock_bodies import sent_body

PNG = "data:image/png;base64,iVBORw0KGgo="
WEB = "https://media.example/cat.png"
TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
EMBEDS = "data:application/octet-stream;base64,"


def body(*messages: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts}


def respond(*messages: Any) -> Respond:
    return to_respond(parse(body(*messages)), request_id="r")


def content(*parts: Any) -> object:
    return respond(user(*parts)).turns[0].content


def refused(kind: type[BadRequest], param: str, *messages: Any, sentence: str | None = None) -> str:
    return check_refused(parse, {"model": "m", "messages": messages}, kind, param, sentence)


def seen(url: str, param: str, detail: Detail = Detail.AUTO, modality: Modality = Modality.IMAGE) -> Media:
    return Media(modality, url, detail, f"messages[0].content{param}")


@pytest.mark.parametrize(
    ("part", "media"),
    [
        (IMAGE, seen(PNG, "[0].image_url.url")),
        ({"type": "image_url", "image_url": {"url": WEB, "detail": None}}, seen(WEB, "[0].image_url.url")),
        ({"type": "image_url", "image_url": {"url": WEB, "detail": "low"}}, seen(WEB, "[0].image_url.url", Detail.LOW)),
        ({"type": "image_url", "image_url": WEB}, seen(WEB, "[0].image_url")),
        ({"type": "video_url", "video_url": {"url": WEB}}, seen(WEB, "[0].video_url.url", modality=Modality.VIDEO)),
        ({"type": "video_url", "video_url": WEB}, seen(WEB, "[0].video_url", modality=Modality.VIDEO)),
        ({"type": "image_embeds", "image_embeds": "UAAA"}, seen(EMBEDS + "UAAA", "[0].image_embeds")),
        # as SGLang's and vLLM's clients send them
        ({"type": "image_url", "image_url": {"url": WEB}, "modalities": "image", "uuid": None},
         seen(WEB, "[0].image_url.url")),
    ],
)  # fmt: skip
def test_each_part_is_an_image_or_a_video(part: object, media: Media) -> None:
    assert content(part) == (media,)


def test_parts_keep_their_order_in_any_number() -> None:
    video = {"type": "video_url", "video_url": {"url": "file:///srv/media/a.mp4"}}
    assert content(IMAGE, TEXT, video, TEXT, IMAGE) == (
        seen(PNG, "[0].image_url.url"),
        "what is this?",
        seen("file:///srv/media/a.mp4", "[2].video_url.url", modality=Modality.VIDEO),
        "what is this?",
        seen(PNG, "[4].image_url.url"),
    )
    many = respond({"role": "system", "content": "be brief"}, *([user(*[IMAGE] * 64)] * 4))
    assert len(many.media) == 256
    assert many.media[255].param == "messages[4].content[63].image_url.url"


def test_a_request_with_media_is_encoded_and_decoded() -> None:
    request = respond(user(TEXT, IMAGE))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Respond) == request


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "input_image", "image_url": PNG},
        {"type": "audio_embeds", "audio_embeds": "UAAA"},
    ],
)
def test_audio_files_and_other_parts_are_refused_by_their_name(part: dict[str, Any]) -> None:
    supported = '"text", "refusal", "image_url", "video_url" or "image_embeds"'
    sentence = f'messages[0].content[1].type: "{part["type"]}" is not supported here; only {supported} is'
    refused(Unsupported, "messages[0].content[1].type", user(TEXT, part), sentence=sentence)


@pytest.mark.parametrize(
    ("param", "part"),
    [
        ("image_url.detail", {"type": "image_url", "image_url": {"url": WEB, "detail": "fine"}}),
        ("image_url.url", {"type": "image_url", "image_url": {}}),
        ("image_url.url", {"type": "image_url", "image_url": {"url": "cat.png"}}),
        ("image_url.url", {"type": "image_url", "image_url": {"url": "https://a.example/cat.bin"}}),
        ("image_url", {"type": "image_url"}),
        ("video_url.url", {"type": "video_url", "video_url": {"url": "data:video/mp4,AAAA"}}),
        ("video_url.detail", {"type": "video_url", "video_url": {"url": WEB, "detail": "low"}}),
        ("image_embeds", {"type": "image_embeds", "image_embeds": "UEsDBAAA"}),
    ],
)
def test_mistakes_name_their_field(param: str, part: object) -> None:
    refused(BadRequest, f"messages[0].content[0].{param}", user(part))


@pytest.mark.parametrize(
    ("param", "part"),
    [
        ("image_url.max_dynamic_patch", {"type": "image_url", "image_url": {"url": WEB, "max_dynamic_patch": 4}}),
        ("modalities", {"type": "image_url", "image_url": {"url": WEB}, "modalities": "multi-images"}),
        ("uuid", {"type": "image_url", "image_url": {"url": WEB}, "uuid": "a"}),
    ],
)
def test_options_of_other_servers_are_refused_by_their_name(param: str, part: object) -> None:
    refused(Unsupported, f"messages[0].content[0].{param}", user(part))


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_the_user_can_send_images(role: str) -> None:
    sentence = f"messages[1].content[1]: only messages of the user can have images and videos, not one of {role}"
    refused(
        BadRequest, "messages[1].content[1]", user(TEXT), {"role": role, "content": [TEXT, IMAGE]}, sentence=sentence
    )


def test_more_images_than_any_model_takes_are_refused() -> None:
    sentence = "messages: has 257 images and videos; a request can have at most 256"
    refused(BadRequest, "messages", user(*[IMAGE] * 200), user(*[IMAGE] * 57), sentence=sentence)


def test_an_error_never_repeats_a_long_url() -> None:
    for url in (PNG.replace(",", ";") + "A" * 100_000, "A" * 100_000, "https://a.example/" + "A" * 100_000):
        part = {"type": "image_url", "image_url": {"url": url}}
        assert len(refused(BadRequest, "messages[0].content[0].image_url.url", user(part))) < 200
    assert len(repr(respond(user({"type": "image_url", "image_url": PNG + "A" * 100_000})))) < 2_000


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just(PNG),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["url", "detail", "type"]), inner),
    max_leaves=5,
)


@given(
    st.sampled_from(["image_url", "video_url", "image_embeds", "text", "input_audio"]),
    st.dictionaries(st.sampled_from(["image_url", "video_url", "image_embeds", "text"]), HOSTILE, max_size=2),
)
def test_any_part_is_read_or_refused(kind: str, fields: dict[str, Any]) -> None:
    try:
        request = respond(user({"type": kind, **fields}))
    except RequestError as raised:
        error = raised
    else:
        assert bool(request.media) == (kind != "text")
        return
    assert len(str(error)) < 2_000
    assert (error.param or "").startswith("messages[0].content[0]")


def test_the_stock_client_sends_what_is_read_here() -> None:
    sent = sent_body(
        lambda client: client.chat.completions.create(
            model="m",
            messages=[
                {"role": "system", "content": "be brief"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "compare"},
                        {"type": "image_url", "image_url": {"url": PNG}},
                        {"type": "image_url", "image_url": {"url": WEB, "detail": "original"}},
                    ],
                },
            ],
        )
    )
    assert to_respond(parse(sent), request_id="r").turns == (
        Turn(Role.SYSTEM, "be brief"),
        Turn(
            Role.USER,
            (
                "compare",
                Media(Modality.IMAGE, PNG, Detail.AUTO, "messages[1].content[1].image_url.url"),
                Media(Modality.IMAGE, WEB, Detail.HIGH, "messages[1].content[2].image_url.url"),
            ),
        ),
    )
