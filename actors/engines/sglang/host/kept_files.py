"""The files that operations of an engine leave: a folder with a limit, and the operations that list and read it.

The node chooses the folder, and operations choose the names, so no asker names a place. The folder outlives this host:
the next life of the engine serves the files of this one. A scheduler that cannot write its file ends, so there must be
room for it before it is asked to. Files that are being written are neither listed nor read; a mark in the folder tells
the next life which of them have no end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from protocol.errors import BadRequest, InternalError, NotReady
from protocol.messages.engine_files import FILE_NAME, PART_BYTES_MAX, FileEntry, FileList, FilePart, ListFiles, ReadFile
from protocol.messages.kind import Message

MARK = ".unfinished"
MB = 1024 * 1024
LISTED_MAX = 256  # files, beyond which the oldest are removed, too


class KeptFiles:
    """The files of one engine, of at most `bytes_max` bytes in all."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder = folder
        self.bytes_max = bytes_max
        self._unfinished: set[str] = set()  # the beginnings of the names of files that are being written
        self.handlers: Mapping[type[Message], Callable[[Message], Awaitable[Message]]] = {
            ListFiles: self._list,
            ReadFile: self._read,
        }

    def begin(self, name: str, bytes_max: int) -> None:
        """Make room for new files whose names begin so; raises `NotReady` if they could not be written.

        The folder, which no other user may enter, is created if it does not exist.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for place in (self.folder, Path(tempfile.gettempdir())):  # SGLang packs a file from a temporary one
                if (free := shutil.disk_usage(place).free) < bytes_max:
                    raise NotReady(f"{place} has {free // MB} MB free, and it may take {bytes_max // MB} MB")
            (self.folder / f".{name}{MARK}").touch()
        except OSError as error:
            raise NotReady(f"nothing can be written into {self.folder}: {error.strerror or error}") from error
        self._unfinished.add(name)

    def finish(self, name: str) -> None:
        """Show the new files whose names begin so."""
        self._unfinished.discard(name)
        with suppress(OSError):
            (self.folder / f".{name}{MARK}").unlink()

    def remove_unfinished(self) -> None:
        """Remove the files that an earlier life has begun and not finished."""
        with suppress(OSError):
            for mark in [*self.folder.glob(f".*{MARK}")]:
                self.remove(mark.name.removeprefix(".").removesuffix(MARK))
                mark.unlink()

    def remove(self, beginning: str) -> None:
        """Remove all files whose names begin so."""
        for name in self.named(beginning):
            with suppress(OSError):
                (self.folder / name).unlink()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all; raises `OSError`."""
        part = self.folder / f".{name}"
        part.write_bytes(data)
        part.replace(self.folder / name)

    def entries(self) -> list[FileEntry]:
        """Return the finished files, the oldest first."""
        found = sorted(self._found())
        return [FileEntry(name, size) for _, name, size in found if not self._is_unfinished(name)]

    def named(self, beginning: str) -> list[str]:
        """Return the names of all files that begin so, unfinished ones among them."""
        return sorted(name for _, name, _ in self._found() if name.startswith(beginning))

    def trim(self) -> None:
        """Remove the oldest finished files while all have more bytes than they may, or are too many."""
        entries = self.entries()
        size = sum(entry.bytes for entry in entries)
        for number, entry in enumerate(entries):
            if size <= self.bytes_max and len(entries) - number <= LISTED_MAX:
                break
            with suppress(OSError):
                (self.folder / entry.name).unlink()
            size -= entry.bytes

    def _is_unfinished(self, name: str) -> bool:
        return name.startswith(tuple(self._unfinished))

    def _found(self) -> Iterator[tuple[float, str, int]]:
        """Yield the time, the name and the size of each file; links and files of strange names are left out."""
        with suppress(OSError), os.scandir(self.folder) as found:
            for entry in found:
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and FILE_NAME.fullmatch(entry.name):
                        yield about.st_mtime, entry.name, about.st_size

    async def _list(self, _: Message) -> FileList:
        return FileList(tuple(await asyncio.to_thread(self.entries)), self.bytes_max)

    async def _read(self, request: Message) -> FilePart:
        assert isinstance(request, ReadFile)
        return await asyncio.to_thread(self._part, request)

    def _part(self, request: ReadFile) -> FilePart:
        """Return a part of a finished file; raises `BadRequest` if there is none of this name, or it is shorter."""
        name = request.name
        if name not in {entry.name for entry in self.entries()}:
            raise BadRequest(f"there is no file {name!r}: see list-files", param="name")
        try:
            file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise InternalError(f"the file {name} cannot be read: {error.strerror}") from error
        try:
            size = os.fstat(file).st_size
            if not 0 <= request.offset <= size:
                raise BadRequest(f"{name} has {size} bytes", param="offset")
            return FilePart(name, size, os.pread(file, PART_BYTES_MAX, request.offset))
        finally:
            os.close(file)


def kept_files_of(folder: str, bytes_max: int) -> KeptFiles | None:
    """Return the files in a folder, without those that an earlier life has begun and not finished; None without one."""
    if not folder:
        return None
    files = KeptFiles(Path(folder), bytes_max)
    files.remove_unfinished()
    return files
