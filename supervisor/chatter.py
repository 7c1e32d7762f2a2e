"""What a child process says on its own: kept in one bounded file, never on the operator's terminal."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

import trio
from attrs import define, field

READ_BYTES = 64 * 1024


@define(eq=False)
class Chatter:
    """Copies what comes through a pipe into `path`, at most twice `bytes_max` of it, and keeps the last lines."""

    path: Path
    bytes_max: int = 4 * 1024 * 1024
    kept: bool = False  # the file stays when the node is gone
    tail: deque[str] = field(factory=lambda: deque(maxlen=50))

    def pipe(self) -> tuple[trio.lowlevel.FdStream, int]:
        """Return the two ends of a new pipe: ours to read, the child's to write."""
        read, write = os.pipe2(os.O_CLOEXEC)
        return trio.lowlevel.FdStream(read), write

    async def keep(self, output: trio.lowlevel.FdStream) -> None:
        """Copy until every writer of the pipe is gone."""
        async with output:
            while data := await output.receive_some(READ_BYTES):
                self.tail.extend(data.decode(errors="replace").splitlines())
                with suppress(OSError):  # a full disk costs the log, not the engine
                    self._write(data)

    @property
    def last_words(self) -> str:
        """The last line that looks like an exception, which is most likely why a process died, else the last line."""
        for line in reversed(self.tail):
            name, colon, _ = line.strip().partition(":")
            if colon and name.rpartition(".")[2].endswith(("Error", "Exception")) and " " not in name:
                return line.strip()
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "it said nothing")

    def _write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)
            size = file.tell()
        if size > self.bytes_max:
            self.path.replace(self.path.with_suffix(".1.log"))
