"""What a node says to its launcher: that it is up, what its operator is to read, that the file is new, how it ended."""

from __future__ import annotations

import json
import os
from collections import deque
from contextlib import suppress
from typing import Literal, TypeAlias, cast, get_args

import trio
from attrs import define, field, frozen

Kind: TypeAlias = Literal["up", "tell", "reload", "failed", "done"]

LINE_BYTES_MAX = 64 * 1024
READ_BYTES = 16 * 1024


@frozen
class Upward:
    """The node's end of a pipe to its launcher."""

    fd: int

    def say(self, kind: Kind, text: str = "") -> None:
        """Say one thing; a launcher that is gone hears nothing."""
        with suppress(OSError):
            os.write(self.fd, f"{json.dumps([kind, text])}\n".encode())


@define(eq=False)
class Lines:
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


async def hear(lines: Lines) -> tuple[Kind, str] | None:
    """Return the next that a node says, None when it has ended; what is nothing that a node says is left out."""
    while (line := await lines.read()) is not None:
        with suppress(ValueError):
            match json.loads(line):
                case [str() as kind, str() as text] if kind in get_args(Kind):
                    return cast("Kind", kind), text
    return None
