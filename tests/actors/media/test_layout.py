"""Sizes as the models' own processors compute them; the figures are theirs (transformers 5.19, SGLang 0.5.23)."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from actors.media.layout import ASPECT_MAX, LOW_DETAIL_TOKENS, PixelLimits, VisionLayout, resize
from protocol.errors import BadRequest
from protocol.messages.media import Detail

IMAGES, FRAMES = PixelLimits(3136, 1_003_520), PixelLimits(100_352, 602_112)
LAYOUT = VisionLayout(14, 2, 2, IMAGES, FRAMES, image_token=7)
SIDES = st.integers(1, 4000)
MODELS = [  # the least and the most pixels of an image, in folders of models and as their users set them
    IMAGES,
    PixelLimits(3136, 12_845_056),
    PixelLimits(200_704, 1_003_520),
    PixelLimits(200_704, 12_845_056),
    PixelLimits(12_544, 50_176),
    PixelLimits(50_176, 50_176),
]


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [
        ((56, 56), (1, 4, 4), 4),
        ((84, 112), (1, 6, 8), 12),
        ((1, 1), (1, 4, 4), 4),
        ((10, 1000), (1, 2, 40), 20),
        ((13, 1000), (1, 2, 36), 18),
        ((3024, 4032), (1, 60, 82), 1230),
        ((1080, 1920), (1, 52, 94), 1222),
    ],
)
def test_an_image_has_the_grid_that_the_models_own_processor_gives_it(
    size: tuple[int, int], grid: tuple[int, int, int], tokens: int
) -> None:
    fit = LAYOUT.fit_image(*size)
    assert (fit.grid, fit.tokens) == (grid, tokens)


@pytest.mark.parametrize(
    ("frames", "per_second", "size", "count", "grid"),
    [
        (16, 8, (112, 112), 4, (2, 24, 24)),
        (100, 25, (480, 640), 8, (4, 34, 46)),
        (3, 30, (64, 64), 2, (1, 24, 24)),
        (5000, 30, (1080, 1920), 332, (166, 38, 70)),
        (100_000, 25, (720, 1280), 768, (384, 24, 46)),
    ],
)
def test_a_video_has_the_frames_and_the_grid_that_sglang_gives_it(
    frames: int, per_second: float, size: tuple[int, int], count: int, grid: tuple[int, int, int]
) -> None:
    sampling = LAYOUT.sample(frames, per_second)
    assert (len(sampling.frames), sampling.frames[0], sampling.frames[-1]) == (count, 0, frames - 1)
    assert LAYOUT.fit_video(count, *size).grid == grid


@pytest.mark.parametrize("size", [(1, ASPECT_MAX + 1), (ASPECT_MAX * 3 + 1, 3), (0, 5), (5, 0), (-1, 5)])
def test_an_image_that_is_too_narrow_is_refused_with_its_size(size: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match=f"{size[1]} x {size[0]} pixels is too narrow"):
        LAYOUT.fit_image(*size)
    with pytest.raises(BadRequest, match="too narrow"):
        LAYOUT.fit_video(4, *size)


@pytest.mark.parametrize("frames", [0, 1])
def test_a_video_of_one_frame_is_refused(frames: int) -> None:
    with pytest.raises(BadRequest, match=f"this one has {frames}"):
        LAYOUT.sample(frames, 25)


@given(
    st.sampled_from(MODELS), st.integers(1, 50_000), st.floats(1, ASPECT_MAX), st.booleans(), st.sampled_from(Detail)
)
def test_the_processor_of_any_model_makes_of_what_was_decoded_the_grid_that_the_prompt_counts(
    limits: PixelLimits, shorter: int, aspect: float, upright: bool, detail: Detail
) -> None:
    longer = int(shorter * aspect)
    assume(shorter * longer <= 50_000_000)
    size = (longer, shorter) if upright else (shorter, longer)
    layout = evolve(LAYOUT, image=limits)
    fit = layout.fit_image(*size, detail)
    assert layout.fit_image(*fit.decoded).grid == fit.grid
    assert fit.decoded[0] * fit.decoded[1] <= max(size[0] * size[1], fit.tokens * layout.factor**2)
    if detail is not Detail.LOW:
        assert (fit.grid[1] * 14, fit.grid[2] * 14) == resize(*size, 28, limits)


@pytest.mark.parametrize(
    ("limits", "size", "detail", "grid", "decoded"),
    [
        (PixelLimits(12_544, 50_176), (20_000, 100), Detail.AUTO, (1, 226, 2), (10_000, 50)),  # one row of tokens
        (PixelLimits(3136, 12_845_056), (300, 59_882), Detail.AUTO, (1, 18, 3616), (254, 50_624)),  # 201 times as wide
        (PixelLimits(3136, 12_845_056), (64, 10_929), Detail.LOW, (1, 2, 400), (28, 5600)),
        (PixelLimits(200_704, 12_845_056), (700, 1000), Detail.LOW, (1, 28, 40), (392, 560)),  # was below the least
        (PixelLimits(50_176, 50_176), (132, 1578), Detail.LOW, (1, 4, 54), (132, 1578)),
    ],
)
def test_an_image_is_not_decoded_to_a_size_that_the_models_processor_would_change_again(
    limits: PixelLimits, size: tuple[int, int], detail: Detail, grid: tuple[int, int, int], decoded: tuple[int, int]
) -> None:
    fit = evolve(LAYOUT, image=limits).fit_image(*size, detail)
    assert (fit.grid, fit.decoded) == (grid, decoded)


@given(st.integers(2, 768), SIDES, SIDES)
def test_a_video_that_was_resized_by_its_decoder_keeps_its_grid(frames: int, height: int, width: int) -> None:
    try:
        fit = LAYOUT.fit_video(frames, height, width)
    except BadRequest:
        return
    assert LAYOUT.fit_video(frames, *fit.decoded).grid == fit.grid


@given(SIDES, SIDES)
def test_low_detail_costs_no_more_than_its_tokens(height: int, width: int) -> None:
    assume(max(height, width) <= ASPECT_MAX * min(height, width))
    low, high = (LAYOUT.fit_image(height, width, detail) for detail in (Detail.LOW, Detail.HIGH))
    assert low.tokens <= min(high.tokens, LOW_DETAIL_TOKENS)
    assert high == LAYOUT.fit_image(height, width)
    if high.tokens <= LOW_DETAIL_TOKENS:
        assert low == high


@given(st.integers(2, 100_000), st.floats(0.1, 240))
def test_sampled_frames_are_in_order_and_within_the_video(frames: int, per_second: float) -> None:
    sampling = LAYOUT.sample(frames, per_second)
    assert list(sampling.frames) == sorted(set(sampling.frames))
    assert 0 <= sampling.frames[0] <= sampling.frames[-1] == frames - 1
    assert len(sampling.frames) <= 768
    assert sampling.interval_s > 0


@given(SIDES, SIDES)
def test_a_resized_image_is_within_its_limits_and_keeps_its_aspect(height: int, width: int) -> None:
    assume(max(height, width) <= 10 * min(height, width))
    rows, columns = resize(height, width, 28, IMAGES)
    assert rows % 28 == columns % 28 == 0
    assert IMAGES.pixels_min <= rows * columns <= IMAGES.pixels_max
    assert abs(rows / height - columns / width) * min(height, width) <= 2 * 28
