"""The one folder that a node keeps files in, gone when the node is; and the sweep that removes what nobody survived.

A folder is alive while anyone holds its lock: the node, or a host that inherited the descriptor. A lock dies with its
last holder, whatever killed it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from actors.engines.sglang import leftovers

PREFIX = "espalier-"
LOCK = "lock"


@frozen
class Folder:
    """A node's folder, and the descriptor that keeps it locked."""

    path: Path
    lock: int


@contextmanager
def folder(base: Path) -> Iterator[Folder]:
    """Make a node's folder under `base`, locked; remove it and all it names when the body ends."""
    while (made := _made(base)) is None:
        pass
    path, lock = made
    try:
        yield Folder(path, lock)
    finally:
        remove(path)
        os.close(lock)


def _made(base: Path) -> tuple[Path, int] | None:
    """Make a folder and lock it; None if another node's sweep came in between."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (path / LOCK).exists():
            return path, lock
    os.close(lock)
    return None


def sweep(base: Path) -> list[Path]:
    """Remove the folders under `base` that nobody holds any more, and return them."""
    swept = []
    for path in sorted(base.glob(f"{PREFIX}*")):
        with suppress(OSError):  # another's, or another sweep was faster
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
                swept.append(path)
            finally:
                os.close(lock)
    return swept


def remove(path: Path) -> None:
    """Remove a node's folder with all that its hosts left."""
    with suppress(FileNotFoundError):  # somebody was faster
        for host in path.iterdir():
            if host.is_dir():
                leftovers.remove(host)
    shutil.rmtree(path, ignore_errors=True)
