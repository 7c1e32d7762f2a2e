"""Pictures of benches are what they are said to be."""

from __future__ import annotations

import io
from pathlib import Path

import av
from PIL import Image

from bench.rig.pictures import (
    commented,
    data_url,
    file_url,
    jpeg,
    noise_jpeg,
    picture_body,
    png,
    video,
    video_body,
)


def pixels(picture: bytes) -> bytes:
    return Image.open(io.BytesIO(picture)).convert("RGB").tobytes()


def test_a_seed_decides_a_picture() -> None:
    assert jpeg(64, 48, 1) == jpeg(64, 48, 1)
    assert len({jpeg(64, 48, seed) for seed in range(8)}) == 8
    assert Image.open(io.BytesIO(png(64, 48, 1))).size == (64, 48)


def test_a_comment_changes_the_bytes_and_no_pixel() -> None:
    one, other = (commented(jpeg(64, 48, 1), text) for text in (b"one", b"other"))
    assert one != other
    assert pixels(one) == pixels(other) == pixels(jpeg(64, 48, 1))


def test_a_picture_of_noise_has_about_as_many_bytes_as_asked_for() -> None:
    picture = noise_jpeg(800, 600, 300_000, 1)
    assert 299_990 <= len(picture) <= 300_000
    assert Image.open(io.BytesIO(picture)).size == (800, 600)
    assert pixels(picture)


def test_a_video_has_its_frames() -> None:
    with av.open(io.BytesIO(video(64, 48, 12)), "r") as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 12
    assert (frames[0].width, frames[0].height) == (64, 48)


def test_bodies_have_their_media_before_the_text(tmp_path: Path) -> None:
    urls = data_url(jpeg(8, 8, 1)), file_url(tmp_path, "a.jpg", jpeg(8, 8, 2))
    assert urls[0].startswith("data:image/jpeg;base64,/9j/")
    assert (tmp_path / "a.jpg").read_bytes() == jpeg(8, 8, 2)
    (message,) = picture_body(*urls, text="What?", tokens_max=3)["messages"]
    assert [part.get("image_url", {}).get("url", part.get("text")) for part in message["content"]] == [*urls, "What?"]
    (message,) = video_body("file:///a.mp4")["messages"]
    assert message["content"][0] == {"type": "video_url", "video_url": {"url": "file:///a.mp4"}}
