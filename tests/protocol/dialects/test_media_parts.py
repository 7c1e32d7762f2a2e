"""Images and videos among the parts of a message."""

from __future__ import annotations

import pytest
from attrs import frozen

from protocol.dialects.media_parts import (
    MEDIA_MAX,
    DetailName,
    MediaPart,
    content_of,
    excess,
    image,
    media_count,
    misplaced,
    video,
)
from protocol.media import Detail, Media, Modality
from protocol.strict.mistakes import Mistake
from protocol.text_messages import Role


@frozen
class Words:
    text: str

    def piece(self, _: str) -> str:
        return self.text


@frozen
class Picture(MediaPart):
    def piece(self, path: str) -> Media:
        return image("https://a.example/", f"{path}.url")


def test_texts_alone_are_one_string() -> None:
    assert content_of((Words("a"), Words(""), Words("b")), "content") == "ab"
    assert content_of("ab", "content") == "ab"


def test_texts_images_and_videos_keep_their_order_and_the_names_of_their_fields() -> None:
    seen = Media(Modality.IMAGE, "https://a.example/", Detail.AUTO, "content[1].url")
    assert content_of((Words("a"), Picture(), Words("b")), "content") == ("a", seen, "b")


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        (None, Detail.AUTO),
        ("auto", Detail.AUTO),
        ("low", Detail.LOW),
        ("high", Detail.HIGH),
        ("original", Detail.HIGH),
    ],
)
def test_every_detail_of_openai_has_a_meaning(name: DetailName | None, detail: Detail) -> None:
    assert image("u", "p", name) == Media(Modality.IMAGE, "u", detail, "p")


def test_a_video_has_no_detail() -> None:
    assert video("u", "p") == Media(Modality.VIDEO, "u", Detail.AUTO, "p")


def test_only_messages_of_the_user_can_have_images() -> None:
    parts = (Words("a"), Picture(), Picture())
    assert list(misplaced(Role.USER, parts, "content")) == []
    assert list(misplaced(Role.ASSISTANT, (Words("a"),), "content")) == []
    assert list(misplaced(Role.ASSISTANT, "a", "content")) == []
    for role in (Role.SYSTEM, Role.DEVELOPER, Role.ASSISTANT):
        sentence = f"only messages of the user can have images and videos, not one of {role.value}"
        assert list(misplaced(role, parts, "content")) == [Mistake("content[1]", sentence)]


def test_a_request_has_at_most_so_many_images() -> None:
    assert media_count((Words("a"), Picture(), Picture())) == 2
    assert media_count("a") == media_count(None) == 0
    assert list(excess(MEDIA_MAX, "messages")) == []
    sentence = "has 257 images and videos; a request can have at most 256"
    assert list(excess(MEDIA_MAX + 1, "messages")) == [Mistake("messages", sentence)]
