"""Contents in memory: files without a name, sealed once they are whole and passed to decoders without a copy.

A client's content is never one object of Python: it is written in pieces as it comes, and only a decoder's process
reads its bytes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
FREED_IN_PLACE_BYTES_MAX = 1024 * 1024
"""The most memory freed in a turn of the event loop; it takes about 0.2 ms a MiB."""


@define(eq=False)
class StoredContent:
    """A content: the bytes behind a URL, or the text of a data URL; its owner closes it."""

    descriptor: int
    size_bytes: int
    is_data_url: bool = False
    free: Callable[[int], None] = os.close  # closes the descriptor of much memory, outside the event loop

    def close(self) -> None:
        """Free the content; idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            (os.close if self.size_bytes <= FREED_IN_PLACE_BYTES_MAX else self.free)(descriptor)

    def __del__(self) -> None:
        """Free a content without an owner: the result of an abandoned thread."""
        self.close()


@define(eq=False)
class ContentWriter:
    """A content in the course of being written."""

    descriptor: int
    size_bytes: int = 0

    def write(self, data: bytes) -> None:
        """Append data; raises `OSError` if there is no memory for it."""
        left = memoryview(data)
        while left:
            left = left[os.write(self.descriptor, left) :]
        self.size_bytes += len(data)

    def finish(self, *, is_data_url: bool = False) -> StoredContent:
        """Seal the content, and return it."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        content = StoredContent(self.descriptor, self.size_bytes, is_data_url)
        self.descriptor = -1
        return content


@contextmanager
def content_writer() -> Iterator[ContentWriter]:
    """Yield a writer; an unfinished content is freed after the body. Raises `OSError` without a descriptor left."""
    writer = ContentWriter(os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        yield writer
    finally:
        if writer.descriptor >= 0:
            os.close(writer.descriptor)


def sealed_size(descriptor: int) -> int | None:
    """Return the size of a sealed file, which cannot change any more; None for any other file.

    A mapped file that shrinks would kill this process, so only sealed files are mapped. None also for a name that is
    not ASCII: messages to engines contain it.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            return None
        if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).isascii():
            return None
        return os.fstat(descriptor).st_size
    except OSError:  # no file in memory
        return None
