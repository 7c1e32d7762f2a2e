"""A reserve of file descriptors, and listeners that refuse connections instead of using it.

Strangers can open connections, and all other work of a node needs descriptors too: restarting an engine, writing a log,
reading a key file again. So a few descriptors are held open without a use. When the process has no others left, the
reserve is closed during a task that must not fail, and new connections are refused until it is full again. So a lack of
descriptors costs new connections, and no running work.
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

# The start of an engine takes about ten. Not configurable: it depends only on the needs of this code.
RESERVE = 16
REFUSE_INTERVAL_S = 0.05  # limits the cost of refusals; the kernel's queue is bounded
LOG_INTERVAL_S = 60.0
HEAD_BYTES = 64 * 1024
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@define(eq=False)
class DescriptorReserve:
    """Descriptors held open without a use, and lent when the process has no others left."""

    size: int = RESERVE
    _borrowers: int = 0  # overlapping loans, which end in any order
    _held: list[int] = field(factory=list)

    @property
    def lending(self) -> bool:
        """Whether the reserve is lent to any task now."""
        return self._borrowers > 0

    def fill(self) -> bool:
        """Open the missing descriptors, none during a loan; return whether the reserve is full."""
        with suppress(OSError):
            while not self.lending and len(self._held) < self.size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._held) >= self.size

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Close the descriptors, so that the body can open others; fill the reserve after the last loan."""
        self._borrowers += 1
        self.empty()
        try:
            yield
        finally:
            self._borrowers -= 1
            self.fill()

    def empty(self) -> None:
        """Close all descriptors."""
        while self._held:
            os.close(self._held.pop())


def is_full(error: OSError) -> bool:
    """Return whether an error means a lack of descriptors, or of memory for one."""
    return error.errno in FULL


@define(eq=False)
class GuardedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that accepts connections while the reserve is full, and refuses them one at a time otherwise.

    `refused` is called for each refused connection, and `answer` is sent to it.
    """

    listener: trio.SocketListener
    reserve: DescriptorReserve
    refused: Callable[[], None] = lambda: None
    answer: bytes = b""
    _unlogged: int = 0  # refusals
    _logged_at: float = -LOG_INTERVAL_S

    async def accept(self) -> trio.SocketStream:
        """Return the next connection; refuse connections while no descriptor is left."""
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
            await trio.sleep(REFUSE_INTERVAL_S)

    async def _refuse(self) -> None:
        """Accept a connection with a descriptor of the reserve, answer it, and close it."""
        with self.reserve.lend(), suppress(OSError):
            with trio.move_on_after(REFUSE_INTERVAL_S):  # the client may have left, or sends nothing
                stream = await self.listener.accept()
                self.refused()
                self._log()
                try:
                    if self.answer:
                        await stream.socket.recv(HEAD_BYTES)  # closing with unread data would discard the answer
                        await stream.socket.send(self.answer)
                finally:
                    stream.socket.close()

    def _log(self) -> None:
        self._unlogged += 1
        if trio.current_time() >= self._logged_at + LOG_INTERVAL_S:
            log.error("no file descriptors are left: connections are refused", extra={"count": self._unlogged})
            self._unlogged, self._logged_at = 0, trio.current_time()

    async def aclose(self) -> None:
        """Close the listener."""
        await self.listener.aclose()
