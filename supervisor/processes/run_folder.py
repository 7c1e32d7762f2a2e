"""The run folder of a node: removed when the node ends, or by the next node if it was killed.

A folder is in use while any process holds its lock: the node, or an engine's process with the inherited descriptor. The
kernel releases a lock at the end of its last holder, even after SIGKILL, so a folder is stale if its lock can be taken.

Folders lie in a directory writable by others. So a folder is trusted only if it is a private directory of this user, it
is opened without following links, and everything in it is reached through its descriptor. Before a folder inside a run
folder is removed, an argument removes its references: only the owner of an engine can find what its processes left
elsewhere, such as shared memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

from protocol.errors import StartFailed

PREFIX = "espalier-"
LOCK = "lock"
# Engines have Unix sockets in folders of their own inside the run folder, and a socket's address has at most 107 bytes.
NAME_BYTES_MAX = 24  # of such a socket
BASE_BYTES_MAX = 107 - len(f"/{PREFIX}12345678/e12345678/") - NAME_BYTES_MAX
SHORT_BASES = ("/tmp", "/var/tmp")  # noqa: S108  # run folders are private, whatever else is in there
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Remove: TypeAlias = Callable[[str, int], None]
"""Removes what a folder refers to elsewhere, by its name in an open folder; raises `OSError`."""


@frozen
class RunFolder:
    """A node's folder, and the descriptor of its lock."""

    path: Path
    lock: int

    @property
    def is_intact(self) -> bool:
        """Whether the folder exists, belongs to this user alone and is locked; raises `OSError` if that is unknown.

        Needs no descriptor, and follows no link.
        """
        try:
            return _is_ours(self.path.lstat()) and os.path.samestat((self.path / LOCK).lstat(), os.fstat(self.lock))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def restore(self) -> None:
        """Create the folder again if a cleaner of /tmp has removed it; raises `OSError`.

        A folder created in its place by others is refused. The lock keeps its descriptor's number, which engines
        inherit.
        """
        if self.is_intact:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=stat.S_IRWXU)
        with _opened(self.path, None) as created:
            if not _is_ours(os.fstat(created)):
                raise PermissionError(errno.EPERM, "it is another's, or others may enter it", str(self.path))
            lock = os.open(LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=created)
        try:
            with suppress(BlockingIOError):  # another thread of this node has created it at the same time
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.dup2(lock, self.lock, inheritable=False)
        finally:
            os.close(lock)


def base_folder() -> Path:
    """Return the directory of all run folders: the temporary one, or a usual one if its path is too long for sockets.

    Raises `StartFailed` if there is none.
    """
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:
        raise StartFailed(f"there is no temporary folder for a node's run folder: {error.strerror or error}") from error
    length = len(os.fsencode(temporary))
    if length <= BASE_BYTES_MAX:
        return Path(temporary)
    for path in SHORT_BASES:
        if os.access(path, os.W_OK | os.X_OK):
            return Path(path)
    raise StartFailed(
        f"the temporary folder {temporary} has a path of {length} bytes, which is too long for the sockets of engines,"
        f" and {' and '.join(SHORT_BASES)} cannot be used; set TMPDIR to a folder of at most {BASE_BYTES_MAX} bytes"
    )


@contextmanager
def run_folder(base: Path, remove_folder: Remove) -> Iterator[RunFolder]:
    """Create a node's folder in `base`, locked; remove it and everything it refers to when the body ends."""
    while (created := _create(base)) is None:
        pass
    path, lock = created
    try:
        yield RunFolder(path, lock)
    finally:
        remove(path, remove_folder)
        os.close(lock)


def _create(base: Path) -> tuple[Path, int] | None:
    """Create a folder and lock it; None if another node removed it in between. Raises `StartFailed`."""
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartFailed(f"no folder can be made in {base}: {error.strerror or error}") from error
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (path / LOCK).exists():
            return path, lock
    os.close(lock)
    return None


def remove_stale(base: Path, remove_folder: Remove) -> list[Path]:
    """Remove this user's unlocked folders in `base`; return their paths.

    A folder of another user, or one that others may enter, is left alone.
    """
    removed = []
    with suppress(OSError), _opened(base, None) as parent:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(PREFIX))
        for name in names:
            with suppress(OSError):  # in use, another user's, or already removed by another node
                if _remove_stale(name, parent, remove_folder):
                    removed.append(base / name)
    return removed


def _remove_stale(name: str, parent: int, remove_folder: Remove) -> bool:
    with _opened(name, parent) as folder:
        if not _is_ours(os.fstat(folder)):
            return False
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder, remove_folder)
            os.rmdir(name, dir_fd=parent)
        finally:
            os.close(lock)
    return True


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU


def remove(path: Path, remove_folder: Remove) -> None:
    """Remove a node's folder and everything it refers to; one created in its place by others is left alone."""
    with suppress(OSError), _opened(path, None) as folder:  # another process may have removed it
        if _is_ours(os.fstat(folder)):
            _empty(folder, remove_folder)
            path.rmdir()


@contextmanager
def _opened(path: Path | str, parent: int | None) -> Iterator[int]:
    """Open a folder, following no link to it; raises `OSError`."""
    folder = os.open(path, OPEN_FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def _empty(folder: int, remove_folder: Remove) -> None:
    """Remove the contents of an open folder."""
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        with suppress(OSError):
            if is_folder:
                remove_folder(name, folder)
                shutil.rmtree(name, ignore_errors=True, dir_fd=folder)  # follows no link
            else:
                os.unlink(name, dir_fd=folder)
