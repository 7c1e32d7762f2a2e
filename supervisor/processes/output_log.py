"""What a child process says on its own: kept in one bounded file, never on the operator's terminal.

A thread writes the file: neither the event loop nor the child waits for a disk.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from functools import partial
from pathlib import Path

import trio
from attrs import Factory, define, field

from supervisor.threads.queued_writer import BYTES_MAX, QueuedWriter

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
TAIL_BYTES = 16 * 1024  # of each piece that is read are looked at for its last lines


def lost_output(_: int, size: int) -> bytes:
    """Return what stands where output was lost."""
    return f"\n[{size} bytes of output were lost]\n".encode()


def append(path: Path, bytes_max: int, data: bytes) -> None:
    """Append to a file, and put it aside when it is full; raises `OSError`."""
    with path.open("ab") as file:
        file.write(data)
        size = file.tell()
    if size > bytes_max:
        path.replace(path.with_suffix(".1.log"))


def output_writer(path: Path, bytes_max: int, backlog_bytes_max: int = BYTES_MAX) -> QueuedWriter:
    """Return what appends to `path` in a thread, and keeps at most twice `bytes_max` of it.

    The log is told when that begins to fail, and when it works again.
    """

    def told(error: OSError | ValueError | None) -> None:
        if error is not None:
            log.error("what engines say cannot be kept", extra={"file": str(path), "reason": str(error)})
        else:
            log.info("what engines say is kept again", extra={"file": str(path), "lost_bytes": made.lost_bytes})

    made = QueuedWriter(
        partial(append, path, bytes_max),
        bytes_max=backlog_bytes_max,
        notice=lost_output,
        on_failure=told,
        chunk_bytes=READ_BYTES,
    )
    return made


@define(eq=False)
class OutputLog:
    """Copies what comes through a pipe into `path`, and keeps the last lines; `file` outlives it if it is given."""

    path: Path
    bytes_max: int = 4 * 1024 * 1024
    kept: bool = False  # the file stays when the node is gone
    file: QueuedWriter = field(default=Factory(lambda self: output_writer(self.path, self.bytes_max), takes_self=True))
    tail: deque[str] = field(factory=lambda: deque(maxlen=50))

    def pipe(self) -> tuple[trio.lowlevel.FdStream, int]:
        """Return the two ends of a new pipe: ours to read, the child's to write."""
        read, write = os.pipe2(os.O_CLOEXEC)
        return trio.lowlevel.FdStream(read), write

    async def keep(self, output: trio.lowlevel.FdStream) -> None:
        """Copy until every writer of the pipe is gone; what the disk does not take in time is lost, and counted."""
        async with output:
            while data := await output.receive_some(READ_BYTES):
                self.tail.extend(data[-TAIL_BYTES:].decode(errors="replace").splitlines())
                self.file.put(bytes(data))

    @property
    def last_words(self) -> str:
        """The last line that looks like an exception, which is most likely why a process died, else the last line."""
        for line in reversed(self.tail):
            name, colon, _ = line.strip().partition(":")
            if colon and name.rpartition(".")[2].endswith(("Error", "Exception")) and " " not in name:
                return line.strip()
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "it said nothing")
