"""Files that people name: read whole, up to a size, and without waiting for whoever would write them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

TEMPLATE_BYTES_MAX = 4 * 1024 * 1024


def read(path: Path, bytes_max: int) -> bytes:
    """Return what a regular file holds; raises `OSError` for one that is longer, or that is none.

    To open a pipe waits for a writer, for ever if there is none, and a device may never end: a node that reads its
    files anew would stand still.
    """
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


def check(*paths: Path) -> None:
    """Raise `OSError` for what is no regular file, before a library opens it by its name."""
    for path in paths:
        _check(path.stat(), path)


def _check(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
