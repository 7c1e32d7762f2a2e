"""Videos: what is known of them before they are decoded, and the frames that are kept of them."""

from __future__ import annotations

import pytest

from actors.media.decoder import videos
from actors.media.decoder.content import ContentRefusal
from actors.media.decoder.sniffing import ContentKind
from actors.media.jobs import Bounds, VideoFacts
from tests.rig import media_samples as samples
from tests.rig.media_samples import HEIGHT, WIDTH

BOUNDS = Bounds(pixels_max=1_000_000, aspect_max=100.0, frames_max=100, seconds_max=100.0)
FACTS = VideoFacts(HEIGHT, WIDTH, frames=12, fps=4.0)
CONTAINERS = [
    ("mp4", ContentKind.MP4),
    ("webm", ContentKind.MATROSKA),
    ("matroska", ContentKind.MATROSKA),
    ("avi", ContentKind.AVI),
]
each_container = pytest.mark.parametrize(("container", "kind"), CONTAINERS, ids=[name for name, _ in CONTAINERS])


def shades(content: bytes, kind: ContentKind, facts: VideoFacts, kept: tuple[int, ...]) -> list[int]:
    """Return how bright the middle of each frame is that was kept."""
    frames = videos.decode(content, kind, facts, facts.height, facts.width, kept)
    return [frame[len(frame) // 2] for frame in frames]


@each_container
def test_a_video_has_the_frames_and_the_rate_of_its_container(container: str, kind: ContentKind) -> None:
    assert videos.inspect(samples.video(container), kind, BOUNDS) == FACTS


@each_container
def test_the_frames_that_are_kept_are_those_of_their_places(container: str, kind: ContentKind) -> None:
    found = shades(samples.video(container), kind, FACTS, (0, 3, 3, 11))
    assert found == pytest.approx([0, 70, 70, 255], abs=6)
    assert found[1] == found[2]


def test_a_video_of_a_telephone_is_turned_upright() -> None:
    content = samples.turned_video()
    facts = videos.inspect(content, ContentKind.MP4, BOUNDS)
    assert facts == VideoFacts(WIDTH, HEIGHT, frames=12, fps=4.0)
    assert len(shades(content, ContentKind.MP4, facts, (0, 11))) == 2


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        (Bounds(WIDTH * HEIGHT - 1, 100.0, 100, 100.0), "64 x 48 pixels"),
        (Bounds(1_000_000, 100.0, 11, 100.0), "more than 11 frames"),
        (Bounds(1_000_000, 100.0, 100, 2.9), r"lasts 3.0 s; the limit is 2.9 s"),
    ],
)
def test_a_video_beyond_a_limit_is_refused_before_it_is_decoded(bounds: Bounds, reason: str) -> None:
    with pytest.raises(ContentRefusal, match=reason) as caught:
        videos.inspect(samples.video(), ContentKind.MP4, bounds)
    assert caught.value.code == "too_large"


@each_container
def test_a_truncated_video_is_refused(container: str, kind: ContentKind) -> None:
    content = samples.video(container)
    with pytest.raises(ContentRefusal):
        facts = videos.inspect(content[: len(content) // 2], kind, BOUNDS)
        assert facts.frames < 12  # of a container without the number of its frames
        list(videos.decode(content[: len(content) // 2], kind, FACTS, HEIGHT, WIDTH, (0, 11)))


def test_a_video_that_ends_before_a_frame_that_is_to_be_kept_is_refused() -> None:
    with pytest.raises(ContentRefusal, match="only 12 of its 13 frames"):
        list(videos.decode(samples.video(), ContentKind.MP4, VideoFacts(HEIGHT, WIDTH, 13, 4.0), HEIGHT, WIDTH, (12,)))


def test_a_file_without_a_picture_is_refused() -> None:
    with pytest.raises(ContentRefusal, match="has no video") as caught:
        videos.inspect(samples.sound(), ContentKind.MP4, BOUNDS)
    assert caught.value.code == "unsupported"
