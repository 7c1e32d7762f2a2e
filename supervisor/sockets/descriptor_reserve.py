"""File descriptors kept in reserve, and listeners that refuse connections rather than touch it.

Connections come from strangers, and whatever else a node does needs descriptors too: an engine that is started again, a
log file, a key file that is read anew. Running out of them, whoever has used them up, refuses connections and no more.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio
from attrs import define, field

log = logging.getLogger(__name__)

# An engine's start takes about ten. A constant: it must be what this code may need at once, whatever a file says.
RESERVE = 16
REFUSES_S = 0.05  # between two refusals, so that they are no load; the kernel's queue is bounded
SAYS_EVERY_S = 60.0
HEAD_BYTES = 64 * 1024
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@define(eq=False)
class Reserve:
    """Descriptors that are kept open for nothing, to be given away when there are no others."""

    size: int = RESERVE
    _borrowers: int = 0  # whose descriptors nobody is to take; loans overlap, and end in any order
    _kept: list[int] = field(factory=list)

    @property
    def lending(self) -> bool:
        """Whether anybody has borrowed it now."""
        return self._borrowers > 0

    def fill(self) -> bool:
        """Take as many as are missing, and return whether it is whole."""
        with suppress(OSError):
            while not self.lending and len(self._kept) < self.size:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._kept) >= self.size

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give them away while the body runs; after the last such body as many are taken back as are left."""
        self._borrowers += 1
        self.empty()
        try:
            yield
        finally:
            self._borrowers -= 1
            self.fill()

    def empty(self) -> None:
        """Let go of them."""
        while self._kept:
            os.close(self._kept.pop())


def is_full(error: OSError) -> bool:
    """Whether an error says that there are no descriptors left."""
    return error.errno in FULL


@define(eq=False)
class GuardedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that accepts while the reserve is whole, and else refuses whoever comes, one at a time."""

    listener: trio.SocketListener
    reserve: Reserve
    refused: Callable[[], None] = lambda: None
    answer: bytes = b""  # to those who are refused
    _count: int = 0  # of those of whom nothing has been said
    _said_at: float = -SAYS_EVERY_S

    async def accept(self) -> trio.SocketStream:
        """Return the next connection that there is room for."""
        while True:
            if self.reserve.fill():
                try:
                    return await self.listener.accept()
                except OSError as error:
                    if not is_full(error):
                        raise
            else:
                await trio.lowlevel.wait_readable(self.listener.socket)
                if self.reserve.fill():
                    continue
            if not self.reserve.lending:
                await self._refuse()
            await trio.sleep(REFUSES_S)

    async def _refuse(self) -> None:
        """Accept a connection with a descriptor of the reserve, say no, and close it."""
        with self.reserve.lent(), suppress(OSError):
            with trio.move_on_after(REFUSES_S):  # somebody may have left by now
                stream = await self.listener.accept()
                self.refused()
                self._say()
                try:
                    if self.answer:
                        await stream.socket.recv(HEAD_BYTES)  # what is unread would take the answer with it
                        await stream.socket.send(self.answer)
                finally:
                    stream.socket.close()

    def _say(self) -> None:
        self._count += 1
        if trio.current_time() >= self._said_at + SAYS_EVERY_S:
            log.error("no file descriptors are left: connections are refused", extra={"count": self._count})
            self._count, self._said_at = 0, trio.current_time()

    async def aclose(self) -> None:
        """Close it."""
        await self.listener.aclose()
