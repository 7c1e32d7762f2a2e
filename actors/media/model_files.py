"""The vision layout of a model, from the files of its folder.

Model families differ in their patches, so the supported ones stand in a table; a model of any other family takes text
alone here, even if its weights could do more. The files with the settings of processors, and their precedence, are as
in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import TypeAlias

from actors.media.layout import PixelLimits, VisionLayout
from protocol.errors import StartFailed

Settings: TypeAlias = Mapping[str, object]

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""The supported families, by `model_type`."""

PROCESSOR, IMAGE_PROCESSOR, VIDEO_PROCESSOR = (
    "processor_config.json",  # has the two others within it, if it was written by transformers 5
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
IMAGE_PIXELS = PixelLimits(56 * 56, 28 * 28 * 1280)  # the limits of processors whose settings have none
FRAME_PIXELS = PixelLimits(128 * 28 * 28, 768 * 28 * 28)


def vision_layout(files: Mapping[str, bytes]) -> VisionLayout | None:
    """Return the layout of the model whose files these are, None if it takes text alone.

    Raises `StartFailed` for settings that cannot be used.
    """
    config = _object(files, "config.json")
    vision = config.get("vision_config")
    if config.get("model_type") not in FAMILIES or not isinstance(vision, dict):
        return None
    nested = _object(files, PROCESSOR)
    image = _settings(nested, "image_processor") or _object(files, IMAGE_PROCESSOR)
    video = _settings(nested, "video_processor") or _object(files, VIDEO_PROCESSOR) or image
    if not image:
        raise StartFailed(f"a model with a vision tower needs {PROCESSOR} or {IMAGE_PROCESSOR}")
    patch, merge = _count(vision, "patch_size", 14), _count(vision, "spatial_merge_size", 2)
    temporal = _count(vision, "temporal_patch_size", 2)
    for settings in (image, video):
        if (
            _count(settings, "patch_size", patch),
            _count(settings, "merge_size", merge),
            _count(settings, "temporal_patch_size", temporal),
        ) != (patch, merge, temporal):
            raise StartFailed("the vision tower and its processor divide images into other patches")
    used = sha256(json.dumps([image, video], sort_keys=True).encode()).hexdigest()
    return VisionLayout(
        patch=patch,
        merge=merge,
        temporal_patch=temporal,
        image=_pixels(image, IMAGE_PIXELS),
        video=_pixels(video, FRAME_PIXELS),
        image_token=_token(config, "image_token_id"),
        video_token=_token(config, "video_token_id"),
        settings=used,
    )


def _pixels(settings: Settings, default: PixelLimits) -> PixelLimits:
    """Return the limits of a processor; older settings have `min_pixels` and `max_pixels`, which count first."""
    size = _settings(settings, "size") or {}
    least = _count(settings, "min_pixels", _count(size, "shortest_edge", default.pixels_min))
    most = _count(settings, "max_pixels", _count(size, "longest_edge", default.pixels_max))
    if least > most:
        raise StartFailed(f"the processor of the model resizes to at least {least} pixels and at most {most}")
    return PixelLimits(least, most)


def _token(config: Settings, key: str) -> int | None:
    token = config.get(key)
    return token if isinstance(token, int) and not isinstance(token, bool) and token >= 0 else None


def _count(settings: Settings, key: str, default: int) -> int:
    """Return a positive number of the settings, or the default; raises `StartFailed` for anything else."""
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartFailed(f"{key} of the model's processor is no positive number")
    return value


def _settings(settings: Settings, key: str) -> Settings | None:
    value = settings.get(key)
    return value if isinstance(value, dict) else None


def _object(files: Mapping[str, bytes], name: str) -> Settings:
    try:
        value: object = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise StartFailed(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartFailed(f"{name} is no JSON object")
    return value
