"""Embeddings that a client has computed: a safetensors file with two tensors, read by hand.

The format is eight bytes with the length of a JSON header, the header, and the bytes of the tensors: nothing in it can
run. `embeddings` has a row for each token, and `grid_thw` the patches of the image in time, height and width.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from math import isfinite, prod

from attrs import frozen

from actors.media.decoder.content import ContentRefusal
from actors.media.jobs import EmbeddingFacts
from protocol.tensors import BYTES, Dtype

HEADER_BYTES_MAX = 64 * 1024
LENGTH_BYTES = 8
DIMENSION_MAX = 1 << 31
EMBEDDINGS, GRID, METADATA = "embeddings", "grid_thw", "__metadata__"
DTYPES = {
    "F16": Dtype.FLOAT16,
    "BF16": Dtype.BFLOAT16,
    "F32": Dtype.FLOAT32,
    "I32": Dtype.INT32,
    "I64": Dtype.INT64,
}
OF_EMBEDDINGS, OF_GRIDS = ("F16", "BF16", "F32"), ("I64", "I32")
_EXPONENTS = {Dtype.FLOAT16: 0x7C00, Dtype.BFLOAT16: 0x7F80}  # all ones: infinite, or no number


@frozen
class _Stored:
    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes


def inspect(content: bytes) -> EmbeddingFacts:
    """Return the shape, type and grid of embeddings; raises `ContentRefusal` for anything but finite numbers."""
    header, begin = _header(content)
    unknown = sorted(set(header) - {EMBEDDINGS, GRID, METADATA})
    if unknown:
        raise ContentRefusal(
            f"a file of embeddings has the tensors {EMBEDDINGS} and {GRID} and no others: it has {unknown}"
        )
    embeddings = _stored(header, EMBEDDINGS, content, begin, OF_EMBEDDINGS)
    grid = _stored(header, GRID, content, begin, OF_GRIDS)
    if len(embeddings.shape) != 2 or 0 in embeddings.shape:
        raise ContentRefusal(f"{EMBEDDINGS} must have the shape [tokens, width], and has {list(embeddings.shape)}")
    if grid.shape not in {(3,), (1, 3)}:
        raise ContentRefusal(f"{GRID} must have the shape [3] or [1, 3], and has {list(grid.shape)}")
    _check_finite(embeddings)
    time, height, width = struct.unpack("<3q" if grid.dtype is Dtype.INT64 else "<3i", grid.data)
    return EmbeddingFacts(*embeddings.shape, embeddings.dtype, (time, height, width))


def decode(content: bytes) -> bytes:
    """Return the bytes of the embeddings of a content that has been inspected."""
    header, begin = _header(content)
    return _stored(header, EMBEDDINGS, content, begin, OF_EMBEDDINGS).data


def _header(content: bytes) -> tuple[dict[str, object], int]:
    """Return the header, and where the tensors begin."""
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    if length > min(HEADER_BYTES_MAX, len(content) - LENGTH_BYTES):
        raise ContentRefusal(f"its header has {length} bytes, which is too long, or it is truncated")
    begin = LENGTH_BYTES + length
    try:
        header = json.loads(content[LENGTH_BYTES:begin].decode())
    except (ValueError, RecursionError) as error:
        raise ContentRefusal("its header is no JSON") from error
    if not isinstance(header, dict):
        raise ContentRefusal("its header is no JSON object")
    return header, begin


def _stored(header: dict[str, object], name: str, content: bytes, begin: int, types: Collection[str]) -> _Stored:
    """Return a tensor of the file; raises `ContentRefusal` if its description does not fit its bytes."""
    entry = header.get(name)
    if not isinstance(entry, dict):
        raise ContentRefusal(f"it has no tensor {name}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in types:
        raise ContentRefusal(f"{name} must be of the type {' or '.join(types)}")
    shape, offsets = _numbers(entry.get("shape"), 8), _numbers(entry.get("data_offsets"), 2)
    if shape is None or offsets is None or len(offsets) != 2:
        raise ContentRefusal(f"the shape or the place of {name} is not stated as it should be")
    first, behind = (begin + offset for offset in offsets)
    size = prod(shape) * BYTES[DTYPES[dtype]]
    if behind > len(content):
        raise ContentRefusal(f"it is truncated: {name} ends at byte {behind}, and the file at byte {len(content)}")
    if behind - first != size:
        raise ContentRefusal(f"{name} has {max(0, behind - first)} bytes, and its shape {list(shape)} takes {size}")
    return _Stored(DTYPES[dtype], shape, content[first:behind])


def _numbers(value: object, count_max: int) -> tuple[int, ...] | None:
    """Return a short list of sizes, None if it is none."""
    if not isinstance(value, list) or len(value) > count_max:
        return None
    return tuple(value) if all(type(size) is int and 0 <= size < DIMENSION_MAX for size in value) else None


def _check_finite(stored: _Stored) -> None:
    if (exponent := _EXPONENTS.get(stored.dtype)) is not None:
        values = set(memoryview(stored.data).cast("H"))  # at most 65,536
        finite = all(value & exponent != exponent for value in values)
    else:
        finite = all(map(isfinite, memoryview(stored.data).cast("f")))
    if not finite:
        raise ContentRefusal(f"{EMBEDDINGS} must be finite numbers")
