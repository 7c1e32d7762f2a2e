"""Files of `file:` URLs: regular files below one folder, also by way of links, read in a thread.

A path below the folder is opened first without any effect (`O_PATH`). The kernel then gives its true path, and a
regular file below the folder is opened for reading, by the descriptor and not by its path again. So no link leads out,
even if it is changed meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from functools import partial
from pathlib import Path

import trio
from attrs import define, field

from actors.kit.fair_budget import FairBudget
from actors.kit.shares import BudgetLimits
from protocol.errors import BadRequest, DeadlineExceeded, Overloaded, TooLarge
from supervisor.media.contents import StoredContent, content_writer
from supervisor.media.urls import FileUrl
from supervisor.threads.shared_threads import SharedThreads

log = logging.getLogger(__name__)

READ_BYTES = 1024 * 1024
THREADS_MAX = 4  # a thread at a dead disk cannot be ended
NOT_FOUND = "there is no such file in the folder that file URLs may name"


def file_threads_budget() -> FairBudget:
    """Return a budget of the threads that read files of URLs."""
    return FairBudget("a thread to read a file", BudgetLimits.of_places(THREADS_MAX))


@define(eq=False)
class MediaFiles:
    """Reads files below `root`, or none if it is None."""

    root: Path | None
    within_s: float
    threads: SharedThreads = field(factory=lambda: SharedThreads(file_threads_budget()))

    def check(self) -> None:
        """Raise `BadRequest` if no file may be read."""
        if self.root is None:
            raise BadRequest("this server reads no files: send the content as a data URL")

    async def read(self, url: FileUrl, bytes_max: int, *, owner: str) -> StoredContent:
        """Return the content of a file; raises `RequestError`."""
        self.check()
        assert self.root is not None
        function = partial(_read, self.root, url.path, bytes_max)
        try:
            return await self.threads.run(function, owner=owner, wait_s=self.within_s, within_s=self.within_s)
        except trio.TooSlowError as error:
            log.warning("a file that a client named was not read in time", extra={"folder": str(self.root)})
            raise DeadlineExceeded(f"the file was not read within {self.within_s:g} s") from error


def _read(root: Path, path: str, bytes_max: int) -> StoredContent:
    try:
        opened = _open_below(root, path)
        try:
            with content_writer() as writer:
                while piece := os.read(opened, min(READ_BYTES, bytes_max + 1 - writer.size_bytes)):
                    writer.write(piece)
                    if writer.size_bytes > bytes_max:
                        raise TooLarge(f"a file can have {bytes_max:,} bytes, and this one has more")
                return writer.finish()
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}:
            raise Overloaded("there is no memory or no descriptor left to read the file") from error
        raise BadRequest(NOT_FOUND) from error  # the same error for files outside the folder


def _open_below(root: Path, path: str) -> int:
    """Return a descriptor of a regular file below a folder; raises `OSError` for anything else."""
    folder, named = root.resolve(), Path(os.path.normpath(path))
    if not (named.is_relative_to(root) or named.is_relative_to(folder)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    place = os.open(named, os.O_PATH | os.O_CLOEXEC)
    try:
        by_descriptor = Path(f"/proc/self/fd/{place}")
        if not by_descriptor.readlink().is_relative_to(folder) or not stat.S_ISREG(os.fstat(place).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return os.open(by_descriptor, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)
