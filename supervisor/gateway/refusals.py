"""Clients for which there is no room: each gets an error at once, and a while to read it.

Closing a socket while its client still sends resets the connection, and the client may then never read the answer. So
the sockets are kept until their clients have closed them, each for `KEPT_S` at most, and `KEPT_MAX` at most, or as many
as the process has file descriptors for. One task reads a little of what still comes, and forgets it: to refuse must
cost less than to serve.
"""

from __future__ import annotations

import os
import resource
import socket
from collections import deque
from contextlib import suppress

import trio
from attrs import define, field

from protocol.dialects.http import error_body, error_headers
from protocol.errors import Overloaded

KEPT_MAX = 1024
KEPT_S = 1.0
SPARE_DESCRIPTORS = 128  # that the sockets which are kept never take
LOOK_S = 0.05  # between two looks at the sockets that are kept
LOOKED_AT_MAX = 64  # in one turn
READ_BYTES = 64 * 1024  # of one socket in one look
READS_MAX = 16  # in one look that bring anything


def _answer() -> bytes:
    error = Overloaded("too many clients are connected")
    body = error_body(error)
    headers = [*error_headers(error), (b"content-type", b"application/json"), (b"connection", b"close")]
    lines = [b"HTTP/1.1 503 Service Unavailable", *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body)]) + b"\r\n\r\n" + body


@define(eq=False)
class Refusals:
    """The sockets of refused clients that may still read the answer; `run` must run."""

    descriptors_max: int = field(factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _kept: deque[tuple[socket.socket, float]] = field(factory=deque)  # with the times until which they are kept
    _added: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __len__(self) -> int:
        """Return the number of sockets that are kept."""
        return len(self._kept)

    def refuse(self, fd: int) -> None:
        """Answer the client of a socket without waiting for anything; the caller may close `fd`."""
        try:
            kept = socket.socket(fileno=os.dup(fd))
        except OSError:
            self._close(0)
            return
        # The client has gone.
        with suppress(OSError):
            if _read(kept) != 0:
                kept.send(_answer())
                kept.shutdown(socket.SHUT_WR)
        self._kept.append((kept, trio.current_time() + KEPT_S))
        self._added.unpark()
        # A new descriptor is the lowest one that is free.
        self._close(KEPT_MAX if kept.fileno() < self.descriptors_max - SPARE_DESCRIPTORS else 0)

    async def run(self) -> None:
        """Close the sockets as their clients end or their time is over, until cancelled."""
        try:
            while True:
                while not self._kept:
                    await self._added.park()
                await trio.sleep(LOOK_S)
                reads = 0
                for number in range(len(self._kept)):
                    if reads >= READS_MAX or not self._kept:
                        break
                    reads += self._look_at(*self._kept.popleft())
                    if number % LOOKED_AT_MAX == LOOKED_AT_MAX - 1:
                        await trio.lowlevel.checkpoint()
        finally:
            self._close(0)

    def _look_at(self, kept: socket.socket, until: float) -> bool:
        """Keep a socket or close it; return whether anything had come."""
        read = 0 if trio.current_time() >= until else _read(kept)
        if read == 0:
            kept.close()
        else:
            self._kept.append((kept, until))
        return bool(read)

    def _close(self, most: int) -> None:
        """Close the oldest sockets, so that so many are left at most."""
        while len(self._kept) > most:
            self._kept.popleft()[0].close()


def _read(kept: socket.socket) -> int | None:
    """Read what has come, and return how many bytes; None if nothing has, 0 if nothing will."""
    try:
        return len(kept.recv(READ_BYTES, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return None
    except OSError:
        return 0
