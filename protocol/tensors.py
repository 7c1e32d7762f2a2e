"""Tensors as raw bytes with a checked description; unlike a pickle, they cannot run code.

The bytes of a tensor are attached to its message. Between the processes of one machine they may be in shared memory,
and between nodes with a transfer engine in the memory of the sender. Then the message has their place, and the process
that reads them compares it with the description.
"""

from __future__ import annotations

from enum import StrEnum
from math import prod

from attrs import field, frozen

from protocol.errors import PeerViolation


class Dtype(StrEnum):
    """Element types of tensors in messages; the bytes are little-endian."""

    BOOL = "bool"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


BYTES = {
    Dtype.BOOL: 1,
    Dtype.UINT8: 1,
    Dtype.INT32: 4,
    Dtype.INT64: 8,
    Dtype.FLOAT16: 2,
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT32: 4,
}


FLOATS = frozenset({Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32})
DIMENSIONS_MAX = 8


@frozen
class SharedRegion:
    """The bytes of a tensor in a sealed file in memory: `size` bytes from `offset`, in an open file of a process.

    Numbers of processes and descriptors are reused, so `name` and `inode` identify the file.
    """

    process: int  # the process id
    descriptor: int
    name: str
    inode: int
    offset: int
    size: int


STAMP_BYTES = 16
"""The random bytes of a stamp."""

STAMP_GAP_BYTES = 64
"""The bytes from the beginning of a stamp to those behind it, which are aligned for copying."""


@frozen
class MemoryRange:
    """The bytes of a tensor in the offered memory of a node: a stamp at `offset`, and `size` bytes behind its gap.

    The sender overwrites the stamp when it frees the range. So a reader that finds the stamp after its bytes has read
    the right bytes.
    """

    offset: int
    size: int
    stamp: bytes


@frozen
class Tensor:
    """A dense, C-ordered array: `data` holds `prod(shape)` elements of `dtype`.

    On send, `data` is empty if the bytes are in the `shared` region. On receive, `shared` is this process's mapping,
    which can be forwarded without copying. Bytes in a `remote` range have to be read before anybody uses the tensor.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)
    shared: SharedRegion | None = field(default=None, eq=False)
    remote: MemoryRange | None = field(default=None, eq=False)


NO_TENSOR = Tensor(Dtype.UINT8, (0,), memoryview(b""))
"""The value of a field without a tensor."""


def has_place(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor are in shared memory or in another node's."""
    return tensor.shared is not None or tensor.remote is not None


def size_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor by its dtype and shape; raises `PeerViolation` for an impossible shape."""
    if len(tensor.shape) > DIMENSIONS_MAX:  # a product of so many numbers could take a minute
        raise PeerViolation(f"a tensor of {len(tensor.shape)} dimensions; the limit is {DIMENSIONS_MAX}")
    if any(size < 0 for size in tensor.shape):
        raise PeerViolation(f"a tensor of shape {tensor.shape} has a negative size")
    return prod(tensor.shape) * BYTES[tensor.dtype]


def check_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor; raises `PeerViolation` unless it has as many bytes as its dtype and shape give."""
    expected = size_bytes(tensor)
    if len(tensor.data) != expected:
        raise PeerViolation(
            f"a {tensor.dtype} tensor of shape {tensor.shape} has {expected} bytes, not {len(tensor.data)}"
        )
    return tensor
