"""Pixels as a model's own processors prepare them for its vision tower.

The sizes are given to the processors, since SGLang and transformers have other defaults for the same model folder. A
video is resized twice, as SGLang does: first by its own rule, then by the model's processor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize
from transformers import BaseImageProcessor, BaseVideoProcessor

from actors.engines import model_files
from actors.engines.host.torch_tensors import as_torch
from actors.media.layout import PixelLimits, VisionLayout
from actors.media.model_files import vision_layout
from protocol.errors import BadRequest, InternalError
from protocol.messages.media import MediaItem, Modality


def folder_layout(model_path: str) -> VisionLayout | None:
    """Return the vision layout of a model's folder, None for a model of text alone."""
    return vision_layout(model_files.read_files(Path(model_path)))


@frozen
class PixelProcessor:
    """Turns the pixels of items into the patches that the vision tower of one model takes, `dtype` being the tower's.

    Whoever encodes an item, an encoder or an engine with its vision tower, gets the same patches.
    """

    image: BaseImageProcessor
    video: BaseVideoProcessor
    layout: VisionLayout
    dtype: torch.dtype

    def patches(self, item: MediaItem) -> torch.Tensor:
        """Return the patches of an item, `[patches, elements]`; raises `BadRequest` if its pixels make another grid."""
        self._check_size(item)
        pixels = as_torch(item.data).permute(0, 3, 1, 2)  # frames, channels, height, width
        patches, grid = self._image(pixels) if item.modality is Modality.IMAGE else self._video(pixels)
        if grid != item.grid:  # then prompts have other numbers of placeholders than transformers has patches
            raise InternalError(f"the model's processor made a grid of {_by(grid)} patches, not {_by(item.grid)}")
        return patches.to(self.dtype)

    def _check_size(self, item: MediaItem) -> None:
        frames, height, width, _ = item.data.shape
        if item.modality is Modality.VIDEO:
            grid = self.layout.fit_video(frames, height, width).grid
        elif frames == 1:
            grid = self.layout.fit_image(height, width).grid
        else:
            raise BadRequest(f"an image has one frame, not {frames}")
        if grid != item.grid:
            raise BadRequest(
                f"{frames} x {height} x {width} pixels make a grid of {_by(grid)} patches, not {_by(item.grid)}"
            )

    def _image(self, pixels: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        out = self.image(images=[pixels[0]], size=_size(self.layout.image), return_tensors="pt")
        return out["pixel_values"], _grid(out["image_grid_thw"])

    def _video(self, pixels: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        frames, _, height, width = pixels.shape
        size = list(self.layout.frame_size(frames, height, width))
        resized = resize(pixels, size, interpolation=InterpolationMode.BILINEAR)
        out = self.video(videos=[resized], do_sample_frames=False, size=_size(self.layout.video), return_tensors="pt")
        return out["pixel_values_videos"], _grid(out["video_grid_thw"])


def _grid(grids: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(number) for number in grids[0])


def _by(grid: tuple[int, ...]) -> str:
    return " x ".join(map(str, grid))


def _size(limits: PixelLimits) -> dict[str, int]:
    return {"shortest_edge": limits.pixels_min, "longest_edge": limits.pixels_max}
