"""The layout of images and videos in patches: their sizes after a model's resizing, and their numbers of tokens.

It is arithmetic of sizes alone, so that a prompt's length is known before anything is encoded. Three places depend on
it and must agree: the decoder, the expansion of a prompt's placeholders, and the processor beside the vision tower; a
request on which they differ fails. The formulas are `smart_resize` of the image and video processors of Qwen2-VL and
Qwen2.5-VL in transformers, after SGLang 0.5.23's sampling and resizing of a video's frames.
"""

from __future__ import annotations

from hashlib import sha256
from math import ceil, floor, prod, sqrt

from attrs import evolve, field, frozen

from protocol.errors import BadRequest
from protocol.messages.media import CHANNELS, Detail, MediaForm, MediaItem, Modality, grid_tokens
from protocol.tensors import Dtype, Tensor

ASPECT_MAX = 200  # the longer side divided by the shorter: beyond it the models refuse an image
LOW_DETAIL_TOKENS = 256  # the most tokens of an image of low detail

# SGLang's own sampling and resizing of frames.
FRAME_FACTOR = 2  # the number of frames is a multiple of it
FRAMES_MIN, FRAMES_MAX = 4, 768
FRAMES_PER_SECOND = 2.0
FRAME_SIZE_FACTOR = 28
FRAME_PIXELS_MIN, FRAME_PIXELS_MAX = 128 * 28 * 28, 768 * 28 * 28
VIDEO_PIXELS_MAX = int(128_000 * 28 * 28 * 0.9)
FRAME_PIXELS_SLACK = 1.05  # the least ratio of a frame's most pixels to its least


@frozen
class PixelLimits:
    """The least and the most pixels, height times width, to which an image or a frame is resized."""

    pixels_min: int
    pixels_max: int


@frozen
class Fit:
    """An item as a model sees it: its grid of patches in time, height and width, and its tokens.

    `decoded` is its height and width after decoding: its own, unless they are too large.
    """

    grid: tuple[int, int, int]
    tokens: int
    decoded: tuple[int, int]


@frozen
class FrameSampling:
    """The frames of a video that a model sees, by index, and the time between two of them, in seconds."""

    frames: tuple[int, ...]
    interval_s: float


@frozen
class VisionLayout:
    """The division of images and videos into patches by one model; sizes in pixels."""

    patch: int  # the side of a patch
    merge: int  # patches in each direction that one token stands for
    temporal_patch: int  # frames of a patch
    image: PixelLimits
    video: PixelLimits  # a frame's
    image_token: int | None = None  # the token id that stands for a part of an image; None: the model takes none
    video_token: int | None = None
    settings: str = field(default="", repr=False)  # the settings of the model's processors, for the digest of an item

    def placeholder(self, modality: Modality) -> int | None:
        """Return the token id that stands for items of a modality, None if the model takes none."""
        return self.image_token if modality is Modality.IMAGE else self.video_token

    @property
    def factor(self) -> int:
        """The number by which height and width are divisible after resizing."""
        return self.patch * self.merge

    def fit_image(self, height: int, width: int, detail: Detail = Detail.AUTO) -> Fit:
        """Return the fit of an image of a size; raises `BadRequest` for one that is too narrow for the model."""
        own = resize(height, width, self.factor, self.image)
        if detail is Detail.LOW and (low := self._low(height, width, own)) != own:
            return self._fit(low, 1, low)
        too_large = height * width > self.image.pixels_max
        return self._fit(own, 1, self._shrunk(height, width, own) if too_large else (height, width))

    def sample(self, frames: int, frames_per_second: float) -> FrameSampling:
        """Return the frames of a video that a model sees; raises `BadRequest` for one with too few frames."""
        most = min(FRAMES_MAX, frames) // FRAME_FACTOR * FRAME_FACTOR
        wanted = min(max(frames / frames_per_second * FRAMES_PER_SECOND, FRAMES_MIN), most, frames)
        count = floor(wanted / FRAME_FACTOR) * FRAME_FACTOR
        if count < FRAME_FACTOR:
            raise BadRequest(f"a video has at least {FRAME_FACTOR} frames, and this one has {frames}")
        step = (frames - 1) / (count - 1)
        indices = sorted({*(int(number * step) for number in range(count - 1)), frames - 1})
        return FrameSampling(tuple(indices), frames / frames_per_second / len(indices))

    def fit_video(self, frames: int, height: int, width: int) -> Fit:
        """Return the fit of a video of so many sampled frames; raises `BadRequest` for one that is too narrow."""
        first = self.frame_size(frames, height, width)
        decoded = first if height * width > _frame_pixels_max(frames) else (height, width)
        try:
            size = resize(*first, self.factor, self.video)
        except BadRequest as error:
            raise BadRequest(
                f"a video of {width} x {height} pixels is too narrow: resized to {first[1]} x {first[0]}, one side of"
                f" its frames is more than {ASPECT_MAX} times the other"
            ) from error
        return self._fit(size, ceil(frames / self.temporal_patch), decoded)

    def frame_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which SGLang resizes each frame, before the model's own processor does."""
        limits = PixelLimits(FRAME_PIXELS_MIN, _frame_pixels_max(frames))
        return resize_frame(height, width, FRAME_SIZE_FACTOR, limits)

    def _low(self, height: int, width: int, own: tuple[int, int]) -> tuple[int, int]:
        """Return the size of an image of low detail, which the model's processor keeps; `own` if there is none."""
        limits = self.image
        most = min(limits.pixels_max, max(limits.pixels_min, LOW_DETAIL_TOKENS * self.factor**2))
        if prod(own) <= most:
            return own
        rows, columns = resize(height, width, self.factor, evolve(limits, pixels_max=most))
        longest = ASPECT_MAX * min(rows, columns)
        low = resize(min(rows, longest), min(columns, longest), self.factor, limits)  # rounding may have gone below
        return low if prod(low) < prod(own) and self._becomes(low, low) else own

    def _shrunk(self, height: int, width: int, own: tuple[int, int]) -> tuple[int, int]:
        """Return the decoded size of a large image, from which the model's processor resizes it to `own`.

        That is `own`, but where its rounding exceeds a limit of the same processor: the sides of a narrow image are
        rounded by much. There the shorter side is as long as the processor's aspect needs, or else the image is halved,
        as often as the result stays the same.
        """
        nearest = max(own[0], ceil(own[1] / ASPECT_MAX)), max(own[1], ceil(own[0] / ASPECT_MAX))
        if self._becomes(nearest, own):
            return nearest
        best = height, width
        while (height := height // 2) >= own[0] and (width := width // 2) >= own[1]:
            if self._becomes((height, width), own):
                best = height, width
        return best

    def _becomes(self, size: tuple[int, int], own: tuple[int, int]) -> bool:
        """Whether the model's processor resizes an image of a size to `own`; it refuses one that is too narrow."""
        return max(size) <= ASPECT_MAX * min(size) and resize(*size, self.factor, self.image) == own

    def _fit(self, size: tuple[int, int], steps: int, decoded: tuple[int, int]) -> Fit:
        grid = steps, size[0] // self.patch, size[1] // self.patch
        return Fit(grid, grid_tokens(grid, self.merge), decoded)


def _frame_pixels_max(frames: int) -> int:
    share = VIDEO_PIXELS_MAX / frames * FRAME_FACTOR
    return int(max(min(FRAME_PIXELS_MAX, share), int(FRAME_PIXELS_MIN * FRAME_PIXELS_SLACK)))


def resize(height: int, width: int, factor: int, limits: PixelLimits) -> tuple[int, int]:
    """Return the height and width, divisible by `factor` and within the limits, that keep the aspect as near as can be.

    It is `smart_resize` of transformers, for images and for frames. Raises `BadRequest` if one side is more than
    `ASPECT_MAX` times the other.
    """
    _check_aspect(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > limits.pixels_max:
        scale = sqrt(height * width / limits.pixels_max)
        rows = max(factor, floor(height / scale / factor) * factor)
        columns = max(factor, floor(width / scale / factor) * factor)
    elif rows * columns < limits.pixels_min:
        rows, columns = _enlarged(height, width, factor, limits.pixels_min)
    return rows, columns


def resize_frame(height: int, width: int, factor: int, limits: PixelLimits) -> tuple[int, int]:
    """Return the height and width of SGLang's `smart_resize`, which differs from transformers' for small sides.

    Raises `BadRequest` as `resize` does.
    """
    _check_aspect(height, width)
    rows, columns = max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor)
    if rows * columns > limits.pixels_max:
        scale = sqrt(height * width / limits.pixels_max)
        rows, columns = floor(height / scale / factor) * factor, floor(width / scale / factor) * factor
    elif rows * columns < limits.pixels_min:
        rows, columns = _enlarged(height, width, factor, limits.pixels_min)
    return rows, columns


def _enlarged(height: int, width: int, factor: int, pixels_min: int) -> tuple[int, int]:
    scale = sqrt(pixels_min / (height * width))
    return ceil(height * scale / factor) * factor, ceil(width * scale / factor) * factor


def _check_aspect(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) > ASPECT_MAX * min(height, width):
        raise BadRequest(
            f"an image of {width} x {height} pixels is too narrow: one side can be {ASPECT_MAX} times the other"
        )


def smallest_item(layout: VisionLayout) -> MediaItem:
    """Return the smallest item that a model takes, an image if it takes any, without colours."""
    modality = Modality.VIDEO if layout.image_token is None else Modality.IMAGE
    side, frames = layout.factor, layout.temporal_patch if layout.image_token is None else 1
    fit = layout.fit_image(side, side) if modality is Modality.IMAGE else layout.fit_video(frames, side, side)
    shape = (frames, side, side, CHANNELS)
    data = Tensor(Dtype.UINT8, shape, memoryview(bytes(frames * side * side * CHANNELS)))
    seconds = None if modality is Modality.IMAGE else 1.0
    return MediaItem(modality, sha256(b"").hexdigest(), fit.grid, fit.tokens, MediaForm.PIXELS, data, seconds)
