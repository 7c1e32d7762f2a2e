"""The plan of one item: its decoding job and the shape of the result, from the facts about its content.

The facts come from a process that a client's content may have hijacked. So a plan states the exact shape of the result,
and nothing in it can be larger than the model's own limits (half as large again, where an image is nearly too narrow).
"""

from __future__ import annotations

from hashlib import sha256
from math import prod

from attrs import frozen

from actors.media.jobs import DecodeContent, EmbeddingFacts, Facts, ImageFacts, VideoFacts
from actors.media.layout import Fit, VisionLayout
from protocol.errors import BadRequest
from protocol.messages.media import Media, MediaForm, MediaItem, Modality, grid_tokens
from protocol.tensors import BYTES, Dtype

CHANNELS = 3
SMALL_PIXELS_MAX = 4_000_000  # of a small image, which is decoded in some tenths of a second


@frozen
class Plan:
    """One item without its tensor, the job that decodes it, and the tensor's type and shape."""

    item: MediaItem
    task: DecodeContent
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def is_small(self) -> bool:
        """Whether the item is decoded in a moment: its job may have the decoder beside those for all jobs."""
        facts = self.task.facts
        return isinstance(facts, ImageFacts) and facts.height * facts.width <= SMALL_PIXELS_MAX

    @property
    def size_bytes(self) -> int:
        """The bytes of the tensor."""
        return prod(self.shape) * BYTES[self.dtype]


def plan(media: Media, layout: VisionLayout, content_digest: str, facts: Facts) -> Plan:
    """Return the plan of an item; raises `BadRequest` if the model cannot take it."""
    match facts:
        case ImageFacts():
            fit = layout.fit_image(facts.height, facts.width, media.detail)
            return _pixels(media, layout, content_digest, fit, DecodeContent(facts, *fit.decoded), frames=1)
        case VideoFacts():
            sampling = layout.sample(facts.frames, facts.fps)
            fit = layout.fit_video(len(sampling.frames), facts.height, facts.width)
            task = DecodeContent(facts, *fit.decoded, frames=sampling.frames)
            seconds = sampling.interval_s * layout.temporal_patch
            return _pixels(media, layout, content_digest, fit, task, len(sampling.frames), seconds)
        case EmbeddingFacts():
            return _embeddings(layout, content_digest, facts)


def _pixels(
    media: Media,
    layout: VisionLayout,
    content_digest: str,
    fit: Fit,
    task: DecodeContent,
    frames: int,
    seconds_per_grid: float | None = None,
) -> Plan:
    processing = f"{task.height} {task.width} {fit.grid} {task.frames} {seconds_per_grid}"
    item = MediaItem(
        media.modality,
        _digest(content_digest, media.modality, layout.settings, processing),
        fit.grid,
        fit.tokens,
        MediaForm.PIXELS,
        seconds_per_grid=seconds_per_grid,
    )
    return Plan(item, task, Dtype.UINT8, (frames, task.height, task.width, CHANNELS))


def _embeddings(layout: VisionLayout, content_digest: str, facts: EmbeddingFacts) -> Plan:
    """Return the plan of a client's own embeddings of an image: there must be one for each token of its grid."""
    time, height, width = facts.grid
    tokens = grid_tokens(facts.grid, layout.merge)
    if time != 1 or tokens == 0:
        raise BadRequest(
            f"grid_thw of an image is 1, and its height and width in patches, divisible by {layout.merge}: it is"
            f" {list(facts.grid)}"
        )
    if tokens != facts.tokens:
        raise BadRequest(
            f"a grid of {time} x {height} x {width} patches makes {tokens} tokens, and there are {facts.tokens}"
            " embeddings"
        )
    digest = _digest(content_digest, Modality.IMAGE, layout.settings, "embeddings")
    item = MediaItem(Modality.IMAGE, digest, facts.grid, tokens, MediaForm.EMBEDDINGS)
    return Plan(item, DecodeContent(facts), facts.dtype, (facts.tokens, facts.width))


def _digest(content: str, modality: Modality, settings: str, processing: str) -> str:
    """Return the digest of content and processing, under which embeddings and cached blocks are shared."""
    return sha256(f"{content}\n{modality.value}\n{settings}\n{processing}".encode()).hexdigest()
