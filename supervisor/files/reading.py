"""Reading of an operator's files: whole, up to a limit of bytes, and never waiting for a writer.

A node reads such files again while it serves requests, so a path to a pipe, a device or a dead disk must not stop it.
Only regular files are opened here. A dead disk is the caller's concern: `FileReader` is the port to a thread, and paths
are recorded before they are touched, so that an error can name the hanging path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

TEMPLATE_BYTES_MAX = 4 * 1024 * 1024

_recorded: ContextVar[list[Path] | None] = ContextVar("files that are being read", default=None)


class FileReader(Protocol):
    """A runner of functions that read files while a node runs."""

    async def __call__(self, function: Callable[[], T], /) -> T:
        """Return the result of the function, or raise its error; raises `StartFailed` if a file does not answer."""


@contextmanager
def recording_paths() -> Iterator[list[Path]]:
    """Yield a list of the paths touched in the body, each added before it is touched: the last one may hang."""
    paths: list[Path] = []
    token = _recorded.set(paths)
    try:
        yield paths
    finally:
        _recorded.reset(token)


def record_path(path: Path) -> None:
    """Record that a path is about to be touched."""
    if (paths := _recorded.get()) is not None:
        paths.append(path)


def read(path: Path, bytes_max: int) -> bytes:
    """Return the contents of a regular file; raises `OSError` for a longer file than `bytes_max`, or an irregular one.

    Opening a pipe would wait for a writer, and reading a device might never end.
    """
    data = beginning(path, bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max} bytes", str(path))
    return data


def beginning(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of a regular file, fewer if it ends before; raises `OSError`."""
    record_path(path)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        _require_regular(os.fstat(opened), path)
        return file.read(size)


def template(path: Path) -> str:
    """Return the text of a chat template; raises `OSError` or `UnicodeDecodeError`."""
    return read(path, TEMPLATE_BYTES_MAX).decode()


def require_regular_files(*paths: Path) -> None:
    """Raise `OSError` unless all paths lead to regular files, before a library opens them by name."""
    for path in paths:
        record_path(path)
        _require_regular(path.stat(), path)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
