"""What a node says to its launcher: that its loop turns, that it is up, what its operator is to read, how it ended."""

from __future__ import annotations

import json
import os
import select
from collections import deque
from contextlib import suppress
from typing import Literal, TypeAlias, cast, get_args

import trio
from attrs import define, field

Kind: TypeAlias = Literal["pulse", "up", "tell", "reload", "failed", "done"]

LAST = ("failed", "done")  # are said once, whatever waits before them

LINE_BYTES_MAX = 64 * 1024
READ_BYTES = 16 * 1024
WRITE_BYTES = select.PIPE_BUF  # are taken whole or not at all
UNSENT_BYTES_MAX = 64 * 1024  # beside the pipe itself, which holds as much
TEXT_CHARACTERS_MAX = 4096
PULSE = b'["pulse", ""]\n'


@define(eq=False)
class ParentPipe:
    """The node's end of a pipe to its launcher. It never waits: what the pipe does not take is offered again later."""

    fd: int
    _unsent: bytearray = field(factory=bytearray)

    def __attrs_post_init__(self) -> None:
        os.set_blocking(self.fd, False)

    def say(self, kind: Kind, text: str = "") -> None:
        """Say one thing; a launcher that is gone, or has not read for very long, hears nothing."""
        line = f"{json.dumps([kind, text[:TEXT_CHARACTERS_MAX]])}\n".encode()
        if kind in LAST or len(self._unsent) + len(line) <= UNSENT_BYTES_MAX:
            self._unsent += line
        self._send()

    def pulse(self) -> None:
        """Say that the event loop of this node turns; what waits goes first, and proves the same."""
        if not self._unsent:
            self._unsent += PULSE
            self._send()
            if self._unsent == PULSE:  # nobody reads now; the next one is as good
                self._unsent.clear()
        else:
            self._send()

    def end(self, within_s: float) -> None:
        """Wait until all is sent, as long as it is read; for the end of a process, when no event loop runs any more."""
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
        except OSError:  # the launcher is gone
            self._unsent.clear()


@define(eq=False)
class LineReader:
    """The lines of a stream, one that is too long in pieces of about `LINE_BYTES_MAX`."""

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


async def hear(lines: LineReader, others: deque[str] | None = None) -> tuple[Kind, str] | None:
    """Return the next that a node says, None when it has ended; what is no word of a node is added to `others`."""
    while (line := await lines.read()) is not None:
        with suppress(ValueError):
            match json.loads(line):
                case [str() as kind, str() as text] if kind in get_args(Kind):
                    return cast("Kind", kind), text
        if others is not None:
            others.append(line)
    return None
