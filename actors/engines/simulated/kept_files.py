"""The files that operations of a simulated engine leave, in memory, and the operations that list and read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio
from attrs import define, field

from protocol.errors import BadRequest
from protocol.messages.engine_files import PART_BYTES_MAX, FileEntry, FileList, FilePart, ListFiles, ReadFile
from protocol.messages.kind import Message

BYTES_MAX = 1024 * 1024


@define(eq=False)
class SimulatedFiles:
    """The files of one engine, of at most `bytes_max` bytes in all, the oldest first."""

    bytes_max: int = BYTES_MAX
    _files: dict[str, bytes] = field(factory=dict)

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Message], Awaitable[Message]]]:
        """The handlers of its operations."""
        return {ListFiles: self._list, ReadFile: self._read}

    def write(self, name: str, data: bytes) -> None:
        """Keep a file, and forget the oldest while all have more bytes than they may."""
        self._files[name] = data
        while sum(map(len, self._files.values())) > self.bytes_max:
            del self._files[next(iter(self._files))]

    def named(self, beginning: str) -> list[str]:
        """Return the names of all files that begin so."""
        return sorted(name for name in self._files if name.startswith(beginning))

    async def _list(self, _: Message) -> FileList:
        await trio.lowlevel.checkpoint()
        return FileList(tuple(FileEntry(name, len(data)) for name, data in self._files.items()), self.bytes_max)

    async def _read(self, request: Message) -> FilePart:
        assert isinstance(request, ReadFile)
        await trio.lowlevel.checkpoint()
        if (data := self._files.get(request.name)) is None:
            raise BadRequest(f"there is no file {request.name!r}: see list-files", param="name")
        if not 0 <= request.offset <= len(data):
            raise BadRequest(f"{request.name} has {len(data)} bytes", param="offset")
        return FilePart(request.name, len(data), data[request.offset : request.offset + PART_BYTES_MAX])
