"""Listeners of several processes at one port, with connections divided among them by the kernel (`SO_REUSEPORT`).

A connection belongs to one of the listeners as soon as its handshake is complete, before any process has accepted it.
When a listener is closed, Linux resets its queued connections, unless `net.ipv4.tcp_migrate_req` is set. So a process
accepts its queue and closes its listener in one turn. In the few microseconds between the two a reset is still
possible.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import trio
from attrs import define, field

from supervisor.sockets.descriptor_reserve import HEAD_BYTES, DescriptorReserve, is_full

log = logging.getLogger(__name__)

_Raw: TypeAlias = socket.socket  # a socket with methods that need no checkpoint

QUEUED_MAX = 4096  # connections taken at the end: clients that connect incessantly must not prevent it


@define(eq=False)
class EmptiedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener whose queue is emptied when it is closed; `take` gets the queued connections.

    Without further descriptors the rest is refused by means of the `reserve`: `refused` is called for each connection,
    and `answer` is sent to it.
    """

    listener: trio.abc.Listener[trio.SocketStream]
    socket: trio.socket.SocketType
    take: Callable[[trio.SocketStream], None]
    reserve: DescriptorReserve = field(factory=DescriptorReserve)
    refused: Callable[[], None] = lambda: None
    answer: bytes = b""

    async def accept(self) -> trio.SocketStream:
        """Return the next connection."""
        return await self.listener.accept()

    async def aclose(self) -> None:
        """Accept all queued connections, and close the listener in the same turn."""
        waiting = list[socket.socket]()
        with socket.socket(fileno=self.socket.fileno()) as raw:  # Trio's has no `accept` without a checkpoint
            try:
                self._empty(raw, waiting)
            finally:
                raw.detach()
        self.socket.close()
        for connection in waiting:
            self.take(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))
        await self.listener.aclose()

    def _empty(self, raw: _Raw, waiting: list[_Raw]) -> None:
        for _ in range(QUEUED_MAX):
            try:
                waiting.append(raw.accept()[0])
            except BlockingIOError:  # none is left
                return
            except OSError as error:
                if is_full(error):
                    break
                # Else it is the error of a connection that has ended in the queue.
        with self.reserve.lend():
            for _ in range(QUEUED_MAX - len(waiting)):
                try:
                    self._refuse(raw.accept()[0])
                except BlockingIOError:
                    return
                except OSError as error:
                    if is_full(error):
                        log.warning("no file descriptors are left to refuse the clients of a port that is left")
                        return

    def _refuse(self, connection: _Raw) -> None:
        self.refused()
        with connection, suppress(OSError):  # the client may have left
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.recv(HEAD_BYTES)  # closing with unread data would discard the answer
            connection.send(self.answer)
