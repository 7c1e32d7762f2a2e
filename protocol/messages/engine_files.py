"""The files that operations of an engine leave, such as profiles: their list, and one file part by part.

They lie in a folder of the engine's own, whose place no asker chooses, and are named by the engine.
"""

from __future__ import annotations

import re

from attrs import frozen

from protocol.messages.kind import Kind, Message
from protocol.messages.operation import EngineOperation, OperationScope

PART_BYTES_MAX = 256 * 1024
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The names of files: nothing that could lead out of their folder."""


@frozen
class ListFiles(Message):
    """Ask for the files that operations have left; the result is `FileList`."""


@frozen
class FileEntry:
    """One file."""

    name: str
    bytes: int


@frozen
class FileList(Message):
    """The files that operations have left, the oldest first; beyond `bytes_max` in all the oldest is removed."""

    files: tuple[FileEntry, ...]
    bytes_max: int


@frozen
class ReadFile(Message):
    """Ask for a part of a file, from the byte `offset` on; the result is `FilePart`."""

    name: str
    offset: int = 0


@frozen
class FilePart(Message):
    """At most `PART_BYTES_MAX` bytes of a file; it ends where offset and length make `size`."""

    name: str
    size: int  # of the whole file, in bytes
    data: bytes


OPERATIONS = (
    EngineOperation(
        kind=Kind(95, ListFiles, result=FileList),
        result_kind=Kind(96, FileList),
        name="list-files",
        participle="asked for its files",
        summary="List the files that operations of an engine have left, such as profiles.",
        within_s=5.0,
        path="/engine_files",
        methods=("GET",),
    ),
    EngineOperation(
        kind=Kind(97, ReadFile, result=FilePart),
        result_kind=Kind(98, FilePart),
        name="fetch-file",
        participle="read",
        summary="Save a file that an operation of an engine has left.",
        within_s=10.0,
        scope=OperationScope.ONE,
        saves=True,
    ),
)
