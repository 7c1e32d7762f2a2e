from __future__ import annotations

import json
from typing import Any

import pytest

from actors.media.layout import PixelLimits, VisionLayout
from actors.media.model_files import FRAME_PIXELS, IMAGE_PIXELS, vision_layout
from protocol.errors import StartFailed

CONFIG = {"model_type": "qwen2_vl", "image_token_id": 5, "video_token_id": 6, "vision_config": {"patch_size": 14}}
IMAGE = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 8, "longest_edge": 9}}
VIDEO = {"size": {"shortest_edge": 10, "longest_edge": 11}}


def files(**contents: object) -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(value).encode() for name, value in contents.items()}


def layout_of(**contents: object) -> VisionLayout:
    layout = vision_layout(files(**{"config": CONFIG} | contents))
    assert layout is not None
    return layout


def test_the_settings_of_transformers_5_stand_in_one_file() -> None:
    layout = layout_of(processor_config={"image_processor": IMAGE, "video_processor": VIDEO})
    assert (layout.patch, layout.merge, layout.temporal_patch) == (14, 2, 2)
    assert (layout.image, layout.video) == (PixelLimits(8, 9), PixelLimits(10, 11))
    assert (layout.image_token, layout.video_token) == (5, 6)


def test_older_settings_stand_in_a_file_for_each_processor() -> None:
    layout = layout_of(preprocessor_config=IMAGE, video_preprocessor_config=VIDEO, processor_config={"other": 1})
    assert (layout.image, layout.video) == (PixelLimits(8, 9), PixelLimits(10, 11))


def test_older_names_of_the_limits_count_first() -> None:
    settings = IMAGE | {"min_pixels": 100, "max_pixels": 200}
    assert layout_of(preprocessor_config=settings).image == PixelLimits(100, 200)


def test_without_limits_those_of_the_processors_hold() -> None:
    nested = {"image_processor": {"patch_size": 14}, "video_processor": {"patch_size": 14}}
    layout = layout_of(processor_config=nested)
    assert (layout.image, layout.video) == (IMAGE_PIXELS, FRAME_PIXELS)


def test_other_settings_are_other_settings_in_a_digest() -> None:
    one, same = (layout_of(preprocessor_config=IMAGE) for _ in range(2))
    other = layout_of(preprocessor_config=IMAGE | {"image_mean": [0.5]})
    assert one.settings == same.settings != other.settings


@pytest.mark.parametrize(
    "config", [{"model_type": "qwen2"}, {"model_type": "llava", "vision_config": {}}, CONFIG | {"vision_config": None}]
)
def test_a_model_of_another_family_or_without_a_tower_takes_text_alone(config: dict[str, Any]) -> None:
    assert vision_layout(files(config=config)) is None


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        ({}, "needs processor_config.json or preprocessor_config.json"),
        ({"preprocessor_config": IMAGE | {"patch_size": 16}}, "into other patches"),
        ({"preprocessor_config": IMAGE | {"patch_size": "14"}}, "patch_size of the model's processor is no positive"),
        ({"preprocessor_config": IMAGE | {"patch_size": 0}}, "no positive number"),
        ({"preprocessor_config": IMAGE | {"min_pixels": 10**9}}, "at least 1000000000 pixels and at most 9"),
        ({"preprocessor_config": [1]}, "is no JSON object"),
    ],
)
def test_settings_that_cannot_be_used_are_a_reason_not_to_start(contents: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartFailed, match=sentence):
        layout_of(**contents)


def test_a_file_that_is_no_json_is_a_reason_not_to_start() -> None:
    with pytest.raises(StartFailed, match=r"preprocessor_config\.json cannot be read"):
        vision_layout(files(config=CONFIG) | {"preprocessor_config.json": b"{"})
