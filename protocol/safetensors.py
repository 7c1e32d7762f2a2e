"""The header of a safetensors file: the name, dtype, shape and place of each tensor, checked against the file's size.

A file begins with the size of its header in eight bytes, little-endian; then come the header, which is JSON, and the
bytes of all tensors without holes. The header is untrusted: it comes from clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import msgspec
from attrs import frozen

from protocol.errors import BadRequest
from protocol.tensors import DIMENSIONS_MAX

SIZE_BYTES = 8  # of the size of the header
HEADER_BYTES_MAX = 32 * 1024 * 1024
TENSORS_MAX = 262_144
METADATA = "__metadata__"

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
"""The bits of an element, by the name of its dtype."""


@frozen
class Placed:
    """One tensor of a file: its bytes are from `begin` to `end` behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@frozen
class Header:
    """The tensors of a file by their names, and the offset of the first byte behind the header."""

    tensors: Mapping[str, Placed]
    data_at: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_outer = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)


def header_of(file: memoryview) -> Header:
    """Return the header of a whole file in memory; raises `BadRequest` for a wrong one, or one without tensors."""
    size = header_size(bytes(file[:SIZE_BYTES]), len(file))
    header = read_header(file[SIZE_BYTES : SIZE_BYTES + size], len(file))
    if not header.tensors:
        raise BadRequest("the safetensors file holds no tensors")
    return header


def header_size(start: bytes, file_bytes: int) -> int:
    """Return the size of the header of a file of `file_bytes`; raises `BadRequest` if it does not fit the file."""
    if len(start) < SIZE_BYTES:
        raise BadRequest("this is no safetensors file: it ends before its header")
    size = int.from_bytes(start[:SIZE_BYTES], "little")
    if not 2 <= size <= HEADER_BYTES_MAX:
        raise BadRequest(f"this is no safetensors file: a header of {size} bytes, at most {HEADER_BYTES_MAX} are read")
    if SIZE_BYTES + size > file_bytes:
        raise BadRequest(f"this is no safetensors file: {file_bytes} bytes with a header of {size}")
    return size


def read_header(header: bytes | memoryview, file_bytes: int) -> Header:
    """Return the header of a file of `file_bytes` bytes; raises `BadRequest` for the first contradiction in it."""
    try:
        entries = {name: _entry.decode(raw) for name, raw in _outer.decode(bytes(header)).items() if name != METADATA}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the header of the safetensors file cannot be read: {error}") from None
    if len(entries) > TENSORS_MAX:
        raise BadRequest(f"the file holds {len(entries)} tensors; at most {TENSORS_MAX} are read")
    tensors = {name: _placed(name, entry) for name, entry in entries.items()}
    data_at, end = SIZE_BYTES + len(header), 0
    for name, placed in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if placed.begin != end:
            raise BadRequest(f"{name[:128]} begins at byte {placed.begin} of the tensors, and not at {end}")
        end = placed.end
    if data_at + end != file_bytes:
        raise BadRequest(f"the tensors of the file end at byte {data_at + end}, and the file has {file_bytes}")
    return Header(tensors, data_at)


def _placed(name: str, entry: _Entry) -> Placed:
    """Return one tensor of a header; raises `BadRequest` if its place does not fit its shape and dtype."""
    short = name[:128]
    if (bits := BITS.get(entry.dtype)) is None:
        raise BadRequest(f"{short} has the dtype {entry.dtype[:32]!r}, which is not known here")
    if len(entry.shape) > DIMENSIONS_MAX or any(size < 0 for size in entry.shape):
        raise BadRequest(f"{short} has an impossible shape")
    begin, end = entry.data_offsets
    if begin < 0 or end - begin != prod(entry.shape) * bits // 8:
        raise BadRequest(f"{short} of shape {entry.shape} and dtype {entry.dtype} cannot have {end - begin} bytes")
    return Placed(entry.dtype, tuple(entry.shape), begin, end)
