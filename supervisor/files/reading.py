"""Files that people name: read whole, up to a size, and without waiting for whoever would write them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")

TEMPLATE_BYTES_MAX = 4 * 1024 * 1024

_noted: ContextVar[list[Path] | None] = ContextVar("files that are being read", default=None)


class FileReader(Protocol):
    """Runs what reads files while a node runs."""

    async def __call__(self, function: Callable[[], T], /) -> T:
        """Return what the function returns, or raise what it raises; raises `StartFailed` if files do not answer."""


async def read_inline(function: Callable[[], T], /) -> T:
    """Read files in this thread, whatever that takes: where there are no others, as in tests."""
    await trio.lowlevel.checkpoint()
    return function()


@contextmanager
def recording_paths() -> Iterator[list[Path]]:
    """Yield the list to which each file is added before it is read in the body: the last one may never answer."""
    noted: list[Path] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(path: Path) -> None:
    """Note, for whoever waits, that a file is about to be looked at."""
    if (noted := _noted.get()) is not None:
        noted.append(path)


def read(path: Path, bytes_max: int) -> bytes:
    """Return what a regular file holds; raises `OSError` for one that is longer, or that is none.

    To open a pipe waits for a writer, for ever if there is none, and a device may never end: a node that reads its
    files anew would stand still.
    """
    note(path)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        _check(os.fstat(opened), path)
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max} bytes", str(path))
    return data


def template(path: Path) -> str:
    """Return the text of a chat template; raises `OSError`, or `UnicodeDecodeError`, for one that cannot be read."""
    return read(path, TEMPLATE_BYTES_MAX).decode()


def require_regular_files(*paths: Path) -> None:
    """Raise `OSError` for what is no regular file, before a library opens it by its name."""
    for path in paths:
        note(path)
        _check(path.stat(), path)


def _check(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
