"""The embeddings that an engine returned for an item: checked, and copied out of the engine's buffer."""

from __future__ import annotations

import logging

import trio
from attrs import evolve

from protocol.errors import BadRequest, InternalError, from_code
from protocol.messages.media import EmbeddingOutcome, MediaForm, MediaInfo, MediaItem
from protocol.tensors import Tensor, size_bytes

log = logging.getLogger(__name__)

COPIED_BYTES = 4 * 1024 * 1024  # copied in one turn of the event loop


async def embedded(item: MediaItem, outcome: EmbeddingOutcome, media: MediaInfo) -> MediaItem:
    """Return an item with its embeddings; raises the item's own error, or `InternalError` for a tensor of another form.

    The embeddings are copied, since they outlive the batch: its tensors may share one buffer of the engine.
    """
    await trio.lowlevel.checkpoint()
    if outcome.code:
        raise from_code(outcome.code, outcome.detail)
    _check_embeddings(item, outcome.data, media)
    view = outcome.data.data
    copied = bytearray()
    while len(copied) < len(view):
        copied += view[len(copied) : len(copied) + COPIED_BYTES]
        await trio.lowlevel.checkpoint()
    data = evolve(outcome.data, data=memoryview(copied).toreadonly())
    return evolve(item, form=MediaForm.EMBEDDINGS, data=data)


def check_equal(item: MediaItem, other: MediaItem) -> None:
    """Raise `BadRequest` if an item differs from another one of the same digest in a comparable field."""
    for name in ("modality", "grid", "tokens"):
        wanted, has = getattr(item, name), getattr(other, name)
        if wanted != has:
            raise BadRequest(f"two items have one digest; the {name} of one is {wanted}, of the other {has}")


def _check_embeddings(item: MediaItem, tensor: Tensor, media: MediaInfo) -> None:
    """Raise `InternalError` unless a tensor has the form of an item's embeddings; NaN in it is left to the engine."""
    if tensor.shape != (item.tokens, media.width):
        shape = " x ".join(map(str, tensor.shape))
        raise encoder_fault(
            f"the encoder made {shape} for an item of {item.tokens} tokens, {media.width} elements each"
        )
    if tensor.dtype is not media.dtype:
        raise encoder_fault(f"the encoder made {tensor.dtype}, where its info has {media.dtype}")
    if len(tensor.data) != size_bytes(tensor):
        raise encoder_fault(f"the encoder made {len(tensor.data)} bytes, where the shape needs {size_bytes(tensor)}")


def encoder_fault(detail: str) -> InternalError:
    """Log what an encoder did wrong, and return it as an error."""
    log.error("an encoder returned what it was not asked for", extra={"reason": detail})
    return InternalError(detail)
