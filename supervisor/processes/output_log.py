"""The output of a child process, kept in one bounded file and never on the operator's terminal.

The child writes into a pipe, which this process always reads, and a thread writes the file. So neither the child nor
the event loop ever waits for a disk; output that the disk does not take in time is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from functools import partial
from pathlib import Path

import trio
from attrs import Factory, define, field

from supervisor.threads.queued_writer import BYTES_MAX, QueuedWriter

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
ERROR = re.compile(r"(?P<name>[\w.]*(?:Error|Exception|Interrupt|Exit))(?::\s*(?P<words>.*))?")
TAIL_BYTES = 16 * 1024  # the end of each piece, searched for its last lines


def lost_output(_: int, size: int) -> bytes:
    """Return the notice in place of dropped output."""
    return f"\n[{size} bytes of output were lost]\n".encode()


def append(path: Path, bytes_max: int, data: bytes) -> None:
    """Append to a file, and rotate it beyond `bytes_max` bytes; raises `OSError`."""
    with path.open("ab") as file:
        file.write(data)
        size = file.tell()
    if size > bytes_max:
        path.replace(path.with_suffix(".1.log"))


def output_writer(path: Path, bytes_max: int = FILE_BYTES_MAX, backlog_bytes_max: int = BYTES_MAX) -> QueuedWriter:
    """Return a writer that appends to `path` in a thread, with at most twice `bytes_max` bytes on disk.

    It logs the first failure of writes, and the first success thereafter.
    """

    def log_failure(error: OSError | ValueError | None) -> None:
        if error is not None:
            log.error("the output of an engine cannot be written", extra={"file": str(path), "reason": str(error)})
        else:
            extra = {"file": str(path), "lost_bytes": writer.lost_bytes}
            log.info("the output of an engine is written again", extra=extra)

    writer = QueuedWriter(
        partial(append, path, bytes_max),
        bytes_max=backlog_bytes_max,
        notice=lost_output,
        on_failure=log_failure,
        chunk_bytes=READ_BYTES,
    )
    return writer


@define(eq=False)
class OutputLog:
    """The output of one process: copied from a pipe to the file `path`, and its last lines kept in memory.

    The successive processes of one name may share `file`.
    """

    path: Path
    bytes_max: int = FILE_BYTES_MAX
    persistent: bool = False  # the file is kept when the node ends
    file: QueuedWriter = field(default=Factory(lambda self: output_writer(self.path, self.bytes_max), takes_self=True))
    tail: deque[str] = field(factory=lambda: deque(maxlen=50))

    def pipe(self) -> tuple[trio.lowlevel.FdStream, int]:
        """Return a new pipe: the reading end for `copy_from`, and the descriptor for the child."""
        read, write = os.pipe2(os.O_CLOEXEC)
        return trio.lowlevel.FdStream(read), write

    async def copy_from(self, output: trio.lowlevel.FdStream) -> None:
        """Copy until every writer of the pipe has closed it."""
        async with output:
            while data := await output.receive_some(READ_BYTES):
                self.tail.extend(data[-TAIL_BYTES:].decode(errors="replace").splitlines())
                self.file.put(bytes(data))

    @property
    def last_error(self) -> str | None:
        """The last line that looks like an exception, the likely cause of death; None if there is none.

        An exception without words, as an assertion may be, has the line of code that raised it.
        """
        lines = [line.strip() for line in self.tail]
        for number in reversed(range(len(lines))):
            if (error := ERROR.fullmatch(lines[number])) is not None:
                if error["words"]:
                    return lines[number]
                code = next((line for line in reversed(lines[:number]) if line.strip("~^ ")), "")
                return f"{error['name']}: {code}" if code else error["name"]
        return None

    def reason(self, end: str | None) -> str:
        """Return the last line that looks like an exception, else how the process ended, with the last line."""
        return self.last_error or f"{end or 'without a reason'}; its log ends: {self.last_line}"

    @property
    def last_line(self) -> str:
        """The last line with words in it."""
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "it printed nothing")
