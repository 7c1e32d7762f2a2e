"""The header of a safetensors file: what files have, and what none may have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadRequest
from protocol.safetensors import BITS, HEADER_BYTES_MAX, SIZE_BYTES, Header, header_of, header_size, read_header
from tests.contracts.weights import file_of

SHAPES = st.lists(st.integers(0, 5), max_size=4)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=12), st.tuples(st.sampled_from(sorted(BITS)), SHAPES), max_size=6
)


def filled(dtype: str, shape: list[int]) -> tuple[str, list[int], bytes]:
    """Return a tensor of zeros."""
    size = BITS[dtype] // 8
    for each in shape:
        size *= each
    return dtype, shape, bytes(size)


def read(file: bytes) -> Header:
    """Return the header of a file."""
    size = header_size(file[:SIZE_BYTES], len(file))
    return read_header(file[SIZE_BYTES : SIZE_BYTES + size], len(file))


def headed(header: object, data: int = 0) -> bytes:
    """Return a file with a header, and so many bytes of tensors."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(SIZE_BYTES, "little") + raw + bytes(data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(TENSORS)
def test_every_tensor_of_a_file_is_found_in_its_place(tensors: dict[str, tuple[str, list[int]]]) -> None:
    tensors.pop("__metadata__", None)
    contents = {name: filled(*form) for name, form in tensors.items()}
    file = file_of(contents)
    header = read(file)
    assert {name: (placed.dtype, list(placed.shape)) for name, placed in header.tensors.items()} == tensors
    assert sum(placed.end - placed.begin for placed in header.tensors.values()) == len(file) - header.data_at


@given(TENSORS, st.data())
def test_a_file_that_is_cut_or_changed_is_refused_or_read_as_one(
    tensors: dict[str, tuple[str, list[int]]], data: st.DataObject
) -> None:
    file = bytearray(file_of({name: filled(*form) for name, form in tensors.items()}))
    place = data.draw(st.integers(0, len(file) - 1))
    if data.draw(st.booleans()):
        file[place] = data.draw(st.integers(0, 255))
    else:
        del file[place:]
    try:
        header = read(bytes(file))
    except BadRequest:
        return
    assert all(0 <= placed.begin <= placed.end <= len(file) for placed in header.tensors.values())


def test_metadata_is_no_tensor() -> None:
    assert read(headed({"__metadata__": {"format": "pt"}, "a": entry()}, 8)).tensors.keys() == {"a"}


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "ends before its header"),
        ((1).to_bytes(8, "little"), "a header of 1 bytes"),
        ((HEADER_BYTES_MAX + 1).to_bytes(8, "little"), f"at most {HEADER_BYTES_MAX} are read"),
        ((99).to_bytes(8, "little") + b"{}", "10 bytes with a header of 99"),
        (headed(b"{}}"), "cannot be read"),
        (headed(b"[" * 5000), "cannot be read"),
        (headed([1]), "cannot be read"),
        (headed({"a": 1}), "cannot be read"),
        (headed({"a": entry("F31")}, 8), "dtype 'F31'"),
        (headed({"a": entry(shape=(-1,))}, 8), "impossible shape"),
        (headed({"a": entry(shape=(1,) * 9, offsets=(0, 4))}, 4), "impossible shape"),
        (headed({"a": entry(offsets=(0, 4))}, 4), "cannot have 4 bytes"),
        (headed({"a": entry(offsets=(-8, 0))}), "cannot have"),
        (headed({"a": entry(offsets=(8, 16))}, 16), "begins at byte 8 of the tensors, and not at 0"),
        (headed({"a": entry(), "b": entry()}, 8), "b begins at byte 0"),
        (headed({"a": entry()}, 7), "and the file has"),
        (headed({"a": entry()}, 9), "and the file has"),
    ],
)
def test_each_contradiction_of_a_file_is_named(file: bytes, why: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(file)
    assert why in caught.value.detail


def test_a_file_without_tensors_is_no_update() -> None:
    assert header_of(memoryview(headed({"a": entry()}, 8))).tensors.keys() == {"a"}
    with pytest.raises(BadRequest, match="holds no tensors"):
        header_of(memoryview(headed({})))
