"""Clients for which there is no room: each gets an error at once, and a while to read it.

To close a socket while its client still sends resets the connection, and a client that is reset may never read what it
was sent. So the sockets are kept until their clients have closed them, `KEPT_MAX` at most, each for `KEPT_S` at most;
one task reads what still comes, and forgets it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress

import trio
from attrs import define, field

from protocol.dialects.http import error_body, error_headers
from protocol.errors import Overloaded

KEPT_MAX = 1024
KEPT_S = 1.0
LOOK_S = 0.05  # between two looks at the sockets that are kept
READ_BYTES = 64 * 1024
READS_MAX = 8  # of one socket in one look


def _answer() -> bytes:
    error = Overloaded("too many clients are connected")
    body = error_body(error)
    headers = [*error_headers(error), (b"content-type", b"application/json"), (b"connection", b"close")]
    lines = [b"HTTP/1.1 503 Service Unavailable", *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body)]) + b"\r\n\r\n" + body


@define(eq=False)
class Refusals:
    """The sockets of clients that have been refused, and that may still read the answer; `run` must run."""

    _kept: deque[tuple[socket.socket, float]] = field(factory=deque)  # with the times until which they are kept
    _added: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __len__(self) -> int:
        """Return the number of sockets that are kept."""
        return len(self._kept)

    def refuse(self, fd: int) -> None:
        """Answer the client of a socket without waiting for anything; the caller may close `fd`."""
        try:
            kept = socket.socket(fileno=os.dup(fd))
        except OSError:  # there are no descriptors: clients that may be served need these more
            self._close(0)
            return
        self._kept.append((kept, trio.current_time() + KEPT_S))
        self._added.unpark()
        with suppress(OSError):  # it has gone
            if not _has_ended(kept):
                kept.send(_answer())
                kept.shutdown(socket.SHUT_WR)
        self._close(KEPT_MAX)

    async def run(self) -> None:
        """Close the sockets as their clients end or their time is over, until cancelled."""
        try:
            while True:
                while not self._kept:
                    await self._added.park()
                await trio.sleep(LOOK_S)
                now = trio.current_time()
                for _ in range(len(self._kept)):
                    kept, until = self._kept.popleft()
                    if now >= until or _has_ended(kept):
                        kept.close()
                    else:
                        self._kept.append((kept, until))
        finally:
            self._close(0)

    def _close(self, most: int) -> None:
        """Close the sockets that have been kept longest, so that so many are left at most."""
        while len(self._kept) > most:
            self._kept.popleft()[0].close()


def _has_ended(kept: socket.socket) -> bool:
    """Read what has come, and return whether no more will."""
    try:
        for _ in range(READS_MAX):
            if not kept.recv(READ_BYTES, socket.MSG_DONTWAIT):
                return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False
