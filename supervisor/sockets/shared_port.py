"""Listeners at a port that several processes share, between which the kernel divides connections (`SO_REUSEPORT`).

A connection belongs to one of the listeners as soon as its handshake is complete, before any process has accepted it.
Linux resets the connections that wait at a listener that is closed, unless `net.ipv4.tcp_migrate_req` is set. So a
process that leaves the port accepts all that wait there and closes the listener in one turn. Between the last look at
the queue and the closing there are a few microseconds, in which a reset is still possible.
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

_Raw: TypeAlias = socket.socket  # one whose methods need no checkpoint

QUEUED_MAX = 4096  # connections that are taken at the end: clients that connect without end must not prevent it


async def bound_sockets(port: int, host: str) -> list[trio.socket.SocketType]:
    """Return sockets at all addresses of a host, at which other processes may listen too; raises `OSError`.

    They get no connection before they listen.
    """
    infos = await trio.socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = list[trio.socket.SocketType]()
    try:
        for family, kind, protocol, _, address in infos:
            sockets.append(bound := trio.socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            await bound.bind(address)
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


@define(eq=False)
class EmptiedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener whose queue is emptied when it is closed; `take` gets the connections that waited there.

    Those for which no descriptor is left are refused with one of the `reserve`: `refused` is called for each, and
    `answer` is sent to it.
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
        """Accept all connections that wait, and close the listener in the same turn."""
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
                # It is the error of a connection that has ended in the queue.
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
