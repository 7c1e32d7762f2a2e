"""The one folder that a node keeps files in, gone when the node is; and the sweep that removes what nobody survived.

A folder is alive while anyone holds its lock: the node, or a host that inherited the descriptor. A lock dies with its
last holder, whatever killed it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from actors.engines.sglang import shared_memory
from protocol.errors import StartFailed

PREFIX = "espalier-"
LOCK = "lock"


@frozen
class RunFolder:
    """A node's folder, and the descriptor that keeps it locked."""

    path: Path
    lock: int

    @property
    def stands(self) -> bool:
        """Whether the folder is there, is this user's alone, and is held; raises `OSError` if nobody can say.

        It takes no descriptor, and follows no link.
        """
        try:
            return _is_ours(self.path.lstat()) and os.path.samestat((self.path / LOCK).lstat(), os.fstat(self.lock))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def restore(self) -> None:
        """Make the folder anew if it is gone, as what cleans /tmp leaves it; raises `OSError`.

        One that others have made in its place is not taken. The descriptor stays the same number: hosts inherit it.
        """
        if self.stands:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=stat.S_IRWXU)
        with _opened(self.path, None) as made:
            if not _is_ours(os.fstat(made)):
                raise PermissionError(errno.EPERM, "it is another's, or others may enter it", str(self.path))
            lock = os.open(LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=made)
        try:
            with suppress(BlockingIOError):  # another thread of this node has made it at the same time
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.dup2(lock, self.lock, inheritable=False)
        finally:
            os.close(lock)


@contextmanager
def run_folder(base: Path) -> Iterator[RunFolder]:
    """Make a node's folder under `base`, locked; remove it and all it names when the body ends."""
    while (made := _made(base)) is None:
        pass
    path, lock = made
    try:
        yield RunFolder(path, lock)
    finally:
        remove(path)
        os.close(lock)


def _made(base: Path) -> tuple[Path, int] | None:
    """Make a folder and lock it; None if another node's sweep came in between. Raises `StartFailed` if it cannot be."""
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


def remove_stale(base: Path) -> list[Path]:
    """Remove the folders under `base` that a node of this user made and that nobody holds any more; return them.

    Others may make what they like there: a folder that is another's, or that others may enter, is left alone, and no
    link is followed.
    """
    swept = []
    with suppress(OSError), _opened(base, None) as within:
        with os.scandir(within) as found:
            names = sorted(each.name for each in found if each.name.startswith(PREFIX))
        for name in names:
            with suppress(OSError):  # another's, or another sweep was faster
                if _swept(name, within):
                    swept.append(base / name)
    return swept


def _swept(name: str, within: int) -> bool:
    with _opened(name, within) as folder:
        if not _is_ours(os.fstat(folder)):
            return False
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
            os.rmdir(name, dir_fd=within)
        finally:
            os.close(lock)
    return True


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU


def remove(path: Path) -> None:
    """Remove a node's folder with all that its hosts left; one that others have made in its place is left alone."""
    with suppress(OSError), _opened(path, None) as folder:  # somebody may be faster
        if _is_ours(os.fstat(folder)):
            _empty(folder)
            path.rmdir()


@contextmanager
def _opened(path: Path | str, within: int | None) -> Iterator[int]:
    """Open a folder, following no link to it; raises `OSError`."""
    opened = os.open(path, shared_memory.AS_FOLDER, dir_fd=within)
    try:
        yield opened
    finally:
        os.close(opened)


def _empty(folder: int) -> None:
    """Remove all that is in an open folder: what hosts left, with the shared memory that it lists."""
    with os.scandir(folder) as found:
        entries = [(each.name, each.is_dir(follow_symlinks=False)) for each in found]
    for name, is_folder in entries:
        with suppress(OSError):
            if is_folder:
                shared_memory.remove(name, folder)
            else:
                os.unlink(name, dir_fd=folder)
