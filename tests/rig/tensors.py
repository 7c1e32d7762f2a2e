"""Items with tensors: pixels whose bytes depend on their places, and embeddings of them."""

from __future__ import annotations

from math import ceil

from attrs import evolve

from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import BYTES, Dtype, Tensor

ROW = bytes(range(251))  # a prime, so that no piece of a power of two looks like the one before it


def bytes_of(size: int, seed: int = 0) -> memoryview:
    """Return bytes in which every misplaced piece shows."""
    return memoryview((ROW * (ceil(size / len(ROW)) + 1))[seed % len(ROW) :][:size])


def pixels(size: int = 12, digest: str = "ab" * 32, seed: int = 0) -> MediaItem:
    """Return an item of `size` bytes of pixels, a multiple of 3."""
    data = Tensor(Dtype.UINT8, (1, 1, size // 3, 3), bytes_of(size, seed))
    return MediaItem(Modality.IMAGE, digest, (1, 2, 2), 1, MediaForm.PIXELS, data)


def embeddings(of: MediaItem, size: int = 8, dtype: Dtype = Dtype.FLOAT32, seed: int = 1) -> MediaItem:
    """Return the item with `size` bytes of embeddings."""
    width = size // BYTES[dtype] // of.tokens
    return evolve(of, form=MediaForm.EMBEDDINGS, data=Tensor(dtype, (of.tokens, width), bytes_of(size, seed)))
