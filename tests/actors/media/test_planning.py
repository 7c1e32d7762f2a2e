"""A plan states exactly what is decoded, and its digest names content and processing: neither more nor less."""

from __future__ import annotations

from itertools import combinations

import pytest
from attrs import evolve
from hypothesis import assume, example, given
from hypothesis import strategies as st

from actors.media.jobs import DecodeContent, EmbeddingFacts, Facts, ImageFacts, VideoFacts
from actors.media.planning import plan
from protocol.errors import BadRequest
from protocol.messages.media import Detail, Media, MediaForm, Modality
from protocol.tensors import Dtype
from tests.rig.vision import LAYOUT

CONTENT = "a" * 64
IMAGE, VIDEO = Media(Modality.IMAGE, ""), Media(Modality.VIDEO, "")
SMALL = ImageFacts(56, 112)


def test_an_image_keeps_its_size_if_its_model_takes_that() -> None:
    step = plan(IMAGE, LAYOUT, CONTENT, SMALL)
    assert step.task == DecodeContent(SMALL, 56, 112)
    assert (step.dtype, step.shape, step.size_bytes) == (Dtype.UINT8, (1, 56, 112, 3), 56 * 112 * 3)
    assert (step.item.grid, step.item.tokens, step.item.form) == ((1, 4, 8), 8, MediaForm.PIXELS)


@example(92, 14_794, Detail.AUTO)
@example(12_597, 70, Detail.HIGH)
@example(40, 7_101, Detail.LOW)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(Detail))
def test_nothing_that_is_planned_exceeds_the_limits_of_the_model(height: int, width: int, detail: Detail) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    step = plan(evolve(IMAGE, detail=detail), LAYOUT, CONTENT, ImageFacts(height, width))
    _, rows, columns = step.item.grid
    narrow = max(rows, columns) > 200 * min(rows, columns)  # the processor refuses its own result
    assert step.task.height * step.task.width <= LAYOUT.image.pixels_max * (1.5 if narrow else 1)
    assert LAYOUT.fit_image(step.task.height, step.task.width).grid == step.item.grid  # what an engine makes of it


@given(st.integers(2, 100_000), st.floats(0.1, 1000), st.integers(16, 4_000), st.integers(16, 4_000))
def test_no_more_frames_are_planned_than_the_model_sees(frames: int, fps: float, height: int, width: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    step = plan(VIDEO, LAYOUT, CONTENT, VideoFacts(height, width, frames, fps))
    kept = step.task.frames
    assert step.shape[0] == len(kept) <= 768
    assert list(kept) == sorted(kept)
    assert 0 <= kept[0] <= kept[-1] < frames
    assert step.item.seconds_per_grid is not None
    assert step.item.tokens == LAYOUT.fit_video(len(kept), *step.shape[1:3]).tokens


def test_embeddings_are_as_many_as_their_grid_makes_tokens() -> None:
    step = plan(IMAGE, LAYOUT, CONTENT, EmbeddingFacts(6, 5, Dtype.BFLOAT16, (1, 4, 6)))
    assert (step.dtype, step.shape, step.size_bytes) == (Dtype.BFLOAT16, (6, 5), 60)
    assert (step.item.form, step.item.tokens, step.item.grid) == (MediaForm.EMBEDDINGS, 6, (1, 4, 6))


@pytest.mark.parametrize(
    ("tokens", "grid", "reason"),
    [
        (7, (1, 4, 6), "makes 6 tokens, and there are 7 embeddings"),
        (6, (2, 4, 6), "grid_thw of an image is 1"),
        (6, (1, 3, 8), "divisible by 2"),
        (6, (1, 0, 6), "divisible by 2"),
    ],
)
def test_embeddings_of_an_impossible_shape_are_refused(tokens: int, grid: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        plan(IMAGE, LAYOUT, CONTENT, EmbeddingFacts(tokens, 5, Dtype.FLOAT32, grid))


def test_digests_differ_by_content_and_by_everything_that_changes_the_tokens() -> None:
    large, video = ImageFacts(1200, 1600), VideoFacts(56, 112, 40, 4.0)
    low = evolve(IMAGE, detail=Detail.LOW)
    wide = evolve(LAYOUT, image=evolve(LAYOUT.image, pixels_max=1024 * 28**2))
    cases: list[tuple[Media, object, str, Facts]] = [
        (IMAGE, LAYOUT, CONTENT, SMALL),
        (IMAGE, LAYOUT, "b" * 64, SMALL),
        (IMAGE, evolve(LAYOUT, settings="mean 0.5"), CONTENT, SMALL),
        (IMAGE, wide, CONTENT, large),
        (low, wide, CONTENT, large),
        (VIDEO, LAYOUT, CONTENT, video),
        (VIDEO, LAYOUT, CONTENT, VideoFacts(56, 112, 40, 8.0)),
        (IMAGE, LAYOUT, CONTENT, EmbeddingFacts(8, 5, Dtype.FLOAT32, (1, 4, 8))),
    ]
    digests = [plan(*case).item.digest for case in cases]  # type: ignore[arg-type]
    assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in digests)
    for one, other in combinations(digests, 2):
        assert one != other


def test_the_same_content_has_the_same_digest_whatever_its_url_and_its_detail_if_that_changes_nothing() -> None:
    one = plan(Media(Modality.IMAGE, "https://a.example", Detail.HIGH, "x"), LAYOUT, CONTENT, SMALL)
    other = plan(Media(Modality.IMAGE, "data:,", Detail.LOW, "y"), LAYOUT, CONTENT, SMALL)
    assert one.item == other.item
