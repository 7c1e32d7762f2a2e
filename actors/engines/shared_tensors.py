"""Tensors in memory that the processes of one machine share: sealed files without a path, made and opened here.

A node and the processes of its engines import this file, each with an event loop of its own. A *region* is such a file
(`memfd_create`). Its owner writes it, seals it, and describes it in a message; the recipient opens it as
`/proc/PROCESS/fd/DESCRIPTOR`. A process that dies leaves nothing behind: the kernel frees a region with the last
process that has it open or mapped.

A description is not trusted. The number of a descriptor may belong to another file by now, so the file must have the
described name and inode. It must be sealed before it is mapped: a shrinking file kills its reader, and a changing one
makes the checks of its content worthless.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import define, evolve

from protocol.errors import DeadlineExceeded, InternalError, Overloaded, RequestError
from protocol.tensors import Dtype, SharedRegion, Tensor

SHARED_BYTES_MIN = 64 * 1024  # the smallest shared tensor; a smaller one costs less as an attachment
PIECE_BYTES = 1024 * 1024  # the bytes of one write, which takes less than a millisecond
ALIGNMENT = 64  # a tensor's, within its region
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
NAME_PREFIX = "espalier-"
PATH_PREFIX, PATH_SUFFIX = "/memfd:", " (deleted)"  # around the name of a file in memory, in /proc
MFD_NOEXEC_SEAL = 0x8  # not in Python's os yet; kernels before 6.3 refuse it
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


class SealedMapping(mmap.mmap):
    """A sealed region as this process reads it; others may open `descriptor`, unless it is -1, while it is mapped."""

    descriptor: int
    name: str
    inode: int

    @classmethod
    def of(cls, descriptor: int, size: int) -> SealedMapping:
        """Map the first `size` bytes of a sealed file; the caller closes the descriptor later."""
        mapping = cls(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        mapping.descriptor, mapping.inode = descriptor, os.fstat(descriptor).st_ino
        mapping.name = _name(f"/proc/self/fd/{descriptor}")
        return mapping


@define(eq=False)
class Region:
    """A region of this process that others may open until it is closed; its memory is freed with their mappings."""

    descriptor: int
    name: str
    inode: int
    size: int = 0

    @property
    def is_open(self) -> bool:
        """Whether others may still open it."""
        return self.descriptor >= 0

    def write(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Write tensors one behind the other and seal them, yielding after each piece; raises `RequestError`."""
        try:
            for tensor in tensors:
                self.size = _aligned(self.size)
                os.lseek(self.descriptor, self.size, os.SEEK_SET)
                left = tensor.data.cast("B")
                while left:
                    written = os.write(self.descriptor, left[:PIECE_BYTES])
                    left = left[written:]
                    self.size += written
                    yield
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise _failure(error, "no memory can be shared") from error

    def describe(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the written tensors, with their location in place of their bytes."""
        described, offset = [], 0
        for tensor in tensors:
            offset, size = _aligned(offset), len(tensor.data)
            shared = SharedRegion(os.getpid(), self.descriptor, self.name, self.inode, offset, size)
            described.append(evolve(tensor, data=memoryview(b""), shared=shared))
            offset += size
        return described

    def release(self) -> int:
        """Hand over the descriptor, to be closed by the caller, -1 if it was handed over before; idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """End the sharing: no process can open it any more; idempotent."""
        if (descriptor := self.release()) >= 0:
            os.close(descriptor)


def new_region() -> Region:
    """Return an empty region with a name of 128 random bits; raises `Overloaded` if the system refuses a descriptor."""
    name = NAME_PREFIX + os.urandom(16).hex()
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            descriptor = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.memfd_create(name, flags)
        return Region(descriptor, name, os.fstat(descriptor).st_ino)
    except OSError as error:
        raise _failure(error, "no memory can be shared") from error


def region_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of a region with these tensors."""
    size = 0
    for tensor in tensors:
        size = _aligned(size) + len(tensor.data)
    return size


def sharing_works() -> bool:
    """Whether this process can make a region and open it as another would."""
    probe = Tensor(Dtype.UINT8, (1,), memoryview(b"1"))
    try:
        region = new_region()
    except RequestError:
        return False
    try:
        for _ in region.write([probe]):
            pass
        opened, mappings = open_tensors(region.describe([probe]))
        for mapping in mappings:
            os.close(mapping.descriptor)
        return bytes(opened[0].data) == bytes(probe.data)
    except RequestError:
        return False
    finally:
        region.close()


def passed_on(tensor: Tensor) -> Tensor | None:
    """Return a tensor that lies in a sealed region of this process, as others may open it; None for any other."""
    mapping, shared = tensor.data.obj, tensor.shared
    if not isinstance(mapping, SealedMapping) or mapping.descriptor < 0:
        return None
    if shared is None or (shared.process, shared.descriptor) != (os.getpid(), mapping.descriptor):
        if len(tensor.data) != len(mapping):  # a part of it, at an unknown offset
            return None
        shared = SharedRegion(os.getpid(), mapping.descriptor, mapping.name, mapping.inode, 0, len(mapping))
    return evolve(tensor, data=memoryview(b""), shared=shared)


def open_tensors(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[SealedMapping]]:
    """Return the tensors with the bytes from their regions, and the mappings of the regions, one for each file.

    The caller closes the descriptors of the mappings. Raises `DeadlineExceeded` for a region that is gone, `Overloaded`
    without descriptors or memory, and `InternalError` for a region unlike its description.
    """
    tensors = list(tensors)
    regions = [tensor.shared for tensor in tensors if tensor.shared is not None]
    ends: dict[_File, int] = {}
    for region in regions:
        if region.offset < 0 or region.size < 1:
            raise InternalError(f"the tensors of a message are {region.size} bytes from {region.offset}")
        ends[_file(region)] = max(region.offset + region.size, ends.get(_file(region), 0))
    mappings: dict[_File, SealedMapping] = {}
    try:
        for region in regions:
            if _file(region) not in mappings:
                mappings[_file(region)] = _open(region, ends[_file(region)])
    except RequestError:
        for mapping in mappings.values():
            os.close(mapping.descriptor)
        raise
    opened = [
        tensor if tensor.shared is None else _view(tensor, tensor.shared, mappings[_file(tensor.shared)])
        for tensor in tensors
    ]
    return opened, list(mappings.values())


_File: TypeAlias = tuple[int, int, str, int]


def _file(region: SharedRegion) -> _File:
    return region.process, region.descriptor, region.name, region.inode


def _view(tensor: Tensor, region: SharedRegion, mapping: SealedMapping) -> Tensor:
    own = evolve(region, process=os.getpid(), descriptor=mapping.descriptor)
    return evolve(tensor, data=memoryview(mapping)[region.offset : region.offset + region.size], shared=own)


def _open(region: SharedRegion, end: int) -> SealedMapping:
    """Open and map the file of a region up to its byte `end`, after all checks; raises as `open_tensors` does."""
    path = f"/proc/{region.process}/fd/{region.descriptor}"
    try:
        # The name is compared before the file is opened: opening a device could have an effect.
        if _name(path) != region.name:
            raise FileNotFoundError(errno.ENOENT, "another file has its number")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _failure(error, "the tensors of a message are not there any more") from error
    try:
        _check(descriptor, region, end)
        return SealedMapping.of(descriptor, end)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError | ValueError | OverflowError):
            raise _failure(error, "the tensors of a message cannot be read") from error  # noqa: ASYNC104  # no Cancelled
        raise


def _check(descriptor: int, region: SharedRegion, end: int) -> None:
    status = os.fstat(descriptor)
    if _name(f"/proc/self/fd/{descriptor}") != region.name or status.st_ino != region.inode:
        raise DeadlineExceeded("the tensors of a message are not there any more: another file has their number")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise InternalError("the tensors of a message are in a file that is not sealed")
    if end > status.st_size:
        raise InternalError(f"the tensors of a message end at byte {end} of a file of {status.st_size}")


def _name(path: str) -> str:
    """Return the name of the file in memory to which an entry of /proc leads, empty for any other; raises `OSError`."""
    target = str(Path(path).readlink())
    is_one = target.startswith(PATH_PREFIX) and target.endswith(PATH_SUFFIX)
    return target.removeprefix(PATH_PREFIX).removesuffix(PATH_SUFFIX) if is_one else ""


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _failure(error: Exception, sentence: str) -> RequestError:
    if isinstance(error, OSError) and error.errno in FULL:
        return Overloaded(f"{sentence}: {error.strerror}")
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        return DeadlineExceeded(f"{sentence}: {error.strerror}")
    return InternalError(f"{sentence}: {error}")
