"""Tensors of messages as torch's, and pixels as a model's own processors prepare them for its vision tower.

The sizes are given to the processors, since SGLang and transformers have other defaults for the same model folder. A
video is resized twice, as SGLang does: first by its own rule, then by the model's processor.
"""

from __future__ import annotations

import warnings
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize
from transformers import BaseImageProcessor, BaseVideoProcessor

from actors.engines import model_files
from actors.media.layout import PixelLimits, VisionLayout
from actors.media.model_files import vision_layout
from protocol.errors import BadRequest, InternalError
from protocol.messages.media import CHANNELS, MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing is written into it

DTYPES = {
    Dtype.BOOL: torch.bool,
    Dtype.UINT8: torch.uint8,
    Dtype.INT32: torch.int32,
    Dtype.INT64: torch.int64,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT32: torch.float32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_torch(tensor: Tensor) -> torch.Tensor:
    """Return a tensor of a message as torch's, over the same memory, which is there as long as the tensor.

    The memory of a request is unmapped when its stream ends, and a thread may still compute with it: NumPy's array
    keeps it, where `torch.frombuffer` would keep nothing but an address.
    """
    array = np.frombuffer(tensor.data, np.uint8)
    return torch.from_numpy(array).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def as_message(tensor: torch.Tensor) -> Tensor:
    """Return a tensor of torch as one of a message; it is copied only if it is not dense, or not in host memory."""
    dense = tensor.detach().cpu().contiguous()
    data = dense.view(torch.uint8).reshape(-1).numpy().data
    return Tensor(NAMES[dense.dtype], tuple(dense.shape), data)


def folder_layout(model_path: str) -> VisionLayout | None:
    """Return the vision layout of a model's folder, None for a model of text alone."""
    return vision_layout(model_files.read_files(Path(model_path)))


def smallest_item(layout: VisionLayout) -> MediaItem:
    """Return the smallest item that a model takes, an image if it takes any, without colours."""
    modality = Modality.VIDEO if layout.image_token is None else Modality.IMAGE
    side, frames = layout.factor, layout.temporal_patch if layout.image_token is None else 1
    fit = layout.fit_image(side, side) if modality is Modality.IMAGE else layout.fit_video(frames, side, side)
    data = as_message(torch.zeros(frames, side, side, CHANNELS, dtype=torch.uint8))
    seconds = None if modality is Modality.IMAGE else 1.0
    return MediaItem(modality, sha256(b"").hexdigest(), fit.grid, fit.tokens, MediaForm.PIXELS, data, seconds)


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
