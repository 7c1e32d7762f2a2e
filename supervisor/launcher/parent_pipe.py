"""The pipe from a node to its launcher: heartbeats, readiness, announcements for the operator, and how the node ended.

Each message is a line of JSON: a kind and a text. The node writes without blocking, because its event loop must not
wait for a launcher that is busy or stopped; what the pipe does not accept is kept, up to a limit, and offered again.
Faulthandler writes to the same pipe when a node hangs, so a line that is no message is not an error: the launcher keeps
it as a line of that stack.
"""

from __future__ import annotations

import json
import os
import select
from collections import deque
from contextlib import suppress
from typing import Literal, TypeAlias, cast, get_args

import trio
from attrs import define, field

PipeMessageKind: TypeAlias = Literal["heartbeat", "up", "announce", "reload", "restart", "stay", "failed", "done"]

FINAL = ("failed", "done")  # sent once, however much waits before them
DECISIONS = ("restart", "stay")  # of operators, who are told that they count: few, and sent however much waits

LINE_BYTES_MAX = 64 * 1024
READ_BYTES = 16 * 1024
WRITE_BYTES = select.PIPE_BUF  # are written whole or not at all
UNSENT_BYTES_MAX = 64 * 1024  # in addition to the pipe itself, which holds as much
TEXT_CHARACTERS_MAX = 4096
HEARTBEAT = b'["heartbeat", ""]\n'


@define(eq=False)
class ParentPipe:
    """The node's end of the pipe. No method but `flush` blocks."""

    fd: int
    _unsent: bytearray = field(factory=bytearray)

    def __attrs_post_init__(self) -> None:
        os.set_blocking(self.fd, False)

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the launcher has not had room for."""
        return len(self._unsent)

    def send(self, kind: PipeMessageKind, text: str = "") -> None:
        """Send one message; it is dropped if the launcher has gone, or has not read for very long."""
        line = f"{json.dumps([kind, text[:TEXT_CHARACTERS_MAX]])}\n".encode()
        if kind in FINAL or kind in DECISIONS or len(self._unsent) + len(line) <= UNSENT_BYTES_MAX:
            self._unsent += line
        self._send()

    def heartbeat(self) -> None:
        """Show that the event loop of this node runs; unsent messages go first, and show the same."""
        if not self._unsent:
            self._unsent += HEARTBEAT
            self._send()
            if self._unsent == HEARTBEAT:  # the launcher does not read now; the next one is as good
                self._unsent.clear()
        else:
            self._send()

    def flush(self, within_s: float) -> None:
        """Block until everything is sent, as long as the launcher reads; for a process whose event loop has ended.

        `within_s` limits the wait for each write.
        """
        pipe = select.poll()
        pipe.register(self.fd, select.POLLOUT)
        while self._unsent and pipe.poll(1000 * within_s):  # each time more than nothing is sent
            self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self.fd, self._unsent[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:  # the launcher has gone
            self._unsent.clear()


@define(eq=False)
class LineReader:
    """The lines of a stream; a line that is too long comes in pieces of about `LINE_BYTES_MAX`."""

    stream: trio.abc.ReceiveStream
    _whole: deque[bytes] = field(factory=deque)
    _rest: bytes = b""

    async def read(self) -> str | None:
        """Return the next line, None at the end."""
        await trio.lowlevel.checkpoint()
        while not self._whole:
            data = await self.stream.receive_some(READ_BYTES)
            *whole, self._rest = (self._rest + data).split(b"\n")
            self._whole.extend(whole)
            if self._rest and (not data or len(self._rest) > LINE_BYTES_MAX):
                self._whole.append(self._rest)
                self._rest = b""
            elif not data:
                return None
        return self._whole.popleft().decode(errors="replace")


async def receive(lines: LineReader, other_lines: deque[str] | None = None) -> tuple[PipeMessageKind, str] | None:
    """Return the next message of a node, None at the end; lines that are no message are added to `other_lines`."""
    while (line := await lines.read()) is not None:
        with suppress(ValueError):
            match json.loads(line):
                case [str() as kind, str() as text] if kind in get_args(PipeMessageKind):
                    return cast("PipeMessageKind", kind), text
        if other_lines is not None:
            other_lines.append(line)
    return None
