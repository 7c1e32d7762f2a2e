"""Regions of shared memory: what was written is read, and a description that is not true is found out before it harms."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from actors.engines import shared_tensors
from actors.engines.shared_tensors import (
    ALIGNMENT,
    PIECE_BYTES,
    SEALS,
    Region,
    new_region,
    open_tensors,
    passed_on,
    region_bytes,
    sharing_works,
)
from protocol.errors import DeadlineExceeded, InternalError, Overloaded, RequestError
from protocol.tensors import Dtype, SharedRegion, Tensor
from tests.rig.tensors import bytes_of


def tensor(size: int, seed: int = 0) -> Tensor:
    return Tensor(Dtype.UINT8, (size,), bytes_of(size, seed))


def written(*tensors: Tensor) -> tuple[Region, list[Tensor]]:
    """Return a sealed region with these tensors, and their description."""
    region = new_region()
    for _ in region.write(tensors):
        pass
    return region, region.describe(tensors)


def opened(*described: Tensor) -> list[Tensor]:
    """Return tensors with their bytes; the descriptors are closed at once, as a host does."""
    tensors, mappings = open_tensors(described)
    for mapping in mappings:
        os.close(mapping.descriptor)
    return tensors


def place_of(described: Tensor) -> SharedRegion:
    assert described.shared is not None
    return described.shared


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = len(descriptors())
    yield
    gc.collect()
    assert len(descriptors()) == before


# What is true ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1,), (PIECE_BYTES,), (3 * PIECE_BYTES + 5, 1, ALIGNMENT, 65536)], ids=str)
def test_tensors_are_read_as_they_were_written(sizes: tuple[int, ...]) -> None:
    tensors = [tensor(size, seed) for seed, size in enumerate(sizes)]
    region, described = written(*tensors)
    assert region.size == region_bytes(tensors)
    assert [len(each.data) for each in described] == [0] * len(sizes)
    assert all(place_of(each).offset % ALIGNMENT == 0 for each in described)
    read = opened(*described)
    region.close()
    assert read == tensors
    assert all(each.data.readonly for each in read)


def test_a_region_cannot_be_changed_once_it_is_sealed() -> None:
    region, _ = written(tensor(5000))
    for change in (
        lambda: os.pwrite(region.descriptor, b"x", 0),
        lambda: os.ftruncate(region.descriptor, 1),
        lambda: os.ftruncate(region.descriptor, 9000),
        lambda: fcntl.fcntl(region.descriptor, fcntl.F_ADD_SEALS, 0),
        lambda: mmap.mmap(region.descriptor, 5000),
    ):
        with pytest.raises(PermissionError):
            change()
    region.close()


def test_the_bytes_live_as_long_as_anything_refers_to_them() -> None:
    region, described = written(tensor(PIECE_BYTES))
    (read,) = opened(*described)
    region.close()
    view, read = read.data[5:9], tensor(1)
    assert bytes(view) == bytes(bytes_of(9))[5:]


# Passing on ---------------------------------------------------------------------------------


def test_what_has_been_opened_is_passed_on_without_being_copied() -> None:
    region, described = written(tensor(100), tensor(200, 1))
    tensors, (mapping,) = open_tensors(described)
    region.close()
    again = [passed_on(each) for each in tensors]
    assert all(each is not None and place_of(each).descriptor == mapping.descriptor for each in again)
    assert opened(*[each for each in again if each is not None]) == [tensor(100), tensor(200, 1)]
    os.close(mapping.descriptor)


# What is not true ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "wrong"),
    [
        ({"name": "espalier-" + "0" * 32}, DeadlineExceeded, "another file has its number"),
        ({"name": "../../etc/passwd"}, DeadlineExceeded, "another file has its number"),
        ({"inode": 1}, DeadlineExceeded, "another file has their number"),
        ({"descriptor": 999_999}, DeadlineExceeded, "not there any more"),
        ({"process": 2**22 + 1}, DeadlineExceeded, "not there any more"),
        ({"size": 101}, InternalError, "end at byte 101 of a file of 100"),
        ({"offset": 2**62}, InternalError, "of a file of 100"),
        ({"offset": -1}, InternalError, "100 bytes from -1"),
        ({"size": -5}, InternalError, "-5 bytes from 0"),
    ],
    ids=str,
)
def test_a_description_that_is_not_true_is_an_error_of_its_message(
    change: dict[str, Any], error: type[RequestError], wrong: str
) -> None:
    region, (described,) = written(tensor(100))
    with pytest.raises(error, match=wrong):
        open_tensors([evolve(described, shared=evolve(place_of(described), **change))])
    region.close()


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL])
def test_a_file_that_lacks_a_seal_is_not_mapped(missing: int) -> None:
    region, (described,) = unsealed(SEALS & ~missing)
    with pytest.raises(InternalError, match="not sealed"):
        open_tensors([described])
    region.close()


def unsealed(seals: int = 0) -> tuple[Region, list[Tensor]]:
    """Return a region without all of its seals, and its description."""
    region = new_region()
    os.write(region.descriptor, bytes(100))
    fcntl.fcntl(region.descriptor, fcntl.F_ADD_SEALS, seals)
    return region, region.describe([tensor(100)])


def test_the_number_of_a_descriptor_that_another_file_has_by_now_is_found_out(tmp_path: Path) -> None:
    region, (described,) = written(tensor(100))
    number = region.release()
    other, _ = written(tensor(100, 1))
    near, far = socket.socketpair()
    reading, writing = os.pipe()
    file = os.open(tmp_path / "memfd:x (deleted)", os.O_CREAT | os.O_RDWR)
    for taken in (other.descriptor, near.fileno(), reading, file):
        os.dup2(taken, number)
        with pytest.raises(DeadlineExceeded, match="not there any more"):
            open_tensors([described])
    for each in (reading, writing, file, number):
        os.close(each)
    near.close()
    far.close()
    other.close()


def test_one_wrong_region_among_several_leaves_none_of_them_open() -> None:
    region, (described,) = written(tensor(100))
    wrong = evolve(described, shared=evolve(place_of(described), descriptor=999_999))
    before = len(descriptors())
    for order in ([described, wrong], [wrong, described]):
        with pytest.raises(DeadlineExceeded):
            open_tensors(order)
    assert len(descriptors()) == before
    region.close()


# What the system refuses --------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC])
def test_a_system_without_descriptors_or_memory_is_overloaded(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    region, (described,) = written(tensor(100))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(Overloaded):
            open_tensors([described])
        patch.setattr(os, "write", refuse)
        failed = new_region()
        with pytest.raises(Overloaded, match="no memory can be shared"):
            list(failed.write([tensor(100)]))
        failed.close()
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(Overloaded, match="no memory can be shared"):
            new_region()
        assert not sharing_works()
    region.close()


def test_an_older_kernel_makes_regions_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def older(name: str, flags: int) -> int:
        if flags & shared_tensors.MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "no such flag")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    assert sharing_works()
