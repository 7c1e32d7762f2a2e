"""Contents in memory: files without a name, which are sealed once they are whole and handed to decoders as they are.

What a client chose is never one object of Python: it is written in pieces as it comes, and its bytes are read by a
decoder's process alone.
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
"""Of memory that is freed in a turn of the event loop; freeing it takes about 0.2 ms a MiB."""


@define(eq=False)
class StoredContent:
    """A content: the bytes of what a URL led to, or the text of a data URL; whoever has it closes it."""

    descriptor: int
    size_bytes: int
    is_data_url: bool = False
    free: Callable[[int], None] = os.close  # closes the descriptor of much memory, where that delays nobody

    def close(self) -> None:
        """Free it; idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            (os.close if self.size_bytes <= FREED_IN_PLACE_BYTES_MAX else self.free)(descriptor)

    def __del__(self) -> None:
        """Free it where nobody could: a thread that read a file was abandoned meanwhile."""
        self.close()


@define(eq=False)
class ContentWriter:
    """A content that is being written."""

    descriptor: int
    size_bytes: int = 0

    def write(self, data: bytes) -> None:
        """Append data; raises `OSError` if there is no memory for it."""
        left = memoryview(data)
        while left:
            left = left[os.write(self.descriptor, left) :]
        self.size_bytes += len(data)

    def finish(self, *, is_data_url: bool = False) -> StoredContent:
        """Seal what was written, and return it."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        content = StoredContent(self.descriptor, self.size_bytes, is_data_url)
        self.descriptor = -1
        return content


@contextmanager
def content_writer() -> Iterator[ContentWriter]:
    """Yield a writer; what is not finished in the body is freed. Raises `OSError` if there is no descriptor left."""
    writer = ContentWriter(os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        yield writer
    finally:
        if writer.descriptor >= 0:
            os.close(writer.descriptor)


def sealed_size(descriptor: int) -> int | None:
    """Return the size of a file that nobody can change any more; None if somebody can.

    A file that shrinks while it is mapped would kill this process, so nothing else is ever mapped. None also for one
    whose name is not ASCII: messages to engines contain it.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            return None
        if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).isascii():
            return None
        return os.fstat(descriptor).st_size
    except OSError:  # no file in memory
        return None
