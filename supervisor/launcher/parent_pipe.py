"""The pipe from a node to its launcher: heartbeats, readiness, announcements for the operator, and the node's end.

Each message is a line of JSON: a kind and a text. The node writes without blocking, because its event loop must not
wait for a busy or stopped launcher; bytes without room in the pipe are kept, up to a limit, and offered again.
Faulthandler writes to the same pipe when a node hangs, so a line without a message is not an error: the launcher keeps
it as a line of a stack.
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

# Sent beyond the limit of unsent bytes: the node's last message, and the rare decisions of operators, who rely on them.
FINAL = ("failed", "done")
DECISIONS = ("restart", "stay")

LINE_BYTES_MAX = 64 * 1024
READ_BYTES = 16 * 1024
WRITE_BYTES = select.PIPE_BUF  # written whole or not at all
UNSENT_BYTES_MAX = 64 * 1024  # the pipe itself holds as much again
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
        """The number of bytes that found no room in the pipe."""
        return len(self._unsent)

    def send(self, kind: PipeMessageKind, text: str = "") -> None:
        """Send one message; it is dropped if the launcher has gone, or has stopped reading long ago."""
        line = f"{json.dumps([kind, text[:TEXT_CHARACTERS_MAX]])}\n".encode()
        if kind in FINAL or kind in DECISIONS or len(self._unsent) + len(line) <= UNSENT_BYTES_MAX:
            self._unsent += line
        self._send()

    def heartbeat(self) -> None:
        """Show that the event loop of this node runs; unsent messages go first, and show the same."""
        if not self._unsent:
            self._unsent += HEARTBEAT
            self._send()
            if self._unsent == HEARTBEAT:  # the launcher does not read now; the next heartbeat is as good
                self._unsent.clear()
        else:
            self._send()

    def flush(self, within_s: float) -> None:
        """Block until everything is sent, as long as the launcher reads; for a process without an event loop any more.

        `within_s` limits the wait for each write.
        """
        pipe = select.poll()
        pipe.register(self.fd, select.POLLOUT)
        while self._unsent and pipe.poll(1000 * within_s):
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
    """The lines of a stream; a longer line comes in pieces of about `LINE_BYTES_MAX`."""

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
    """Return the next message of a node, None at the end; other lines are added to `other_lines`."""
    while (line := await lines.read()) is not None:
        with suppress(ValueError):
            match json.loads(line):
                case [str() as kind, str() as text] if kind in get_args(PipeMessageKind):
                    return cast("PipeMessageKind", kind), text
        if other_lines is not None:
            other_lines.append(line)
    return None
