"""Images and videos among the parts of a message."""

from __future__ import annotations

import pytest
from attrs import frozen

from protocol.dialects.media_parts import (
    DetailName,
    MediaPart,
    content_of,
    image,
)
from protocol.messages.media import Detail, Media, Modality


@frozen
class Words:
    text: str

    def piece(self, _: str) -> str:
        return self.text


@frozen
class Picture(MediaPart):
    def piece(self, path: str) -> Media:
        return image("https://a.example/", f"{path}.url")


def test_texts_stay_apart() -> None:
    assert content_of((Words("a"), Words(""), Words("b")), "content") == ("a", "", "b")
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
