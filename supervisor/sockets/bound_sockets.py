"""Sockets bound to a port at every address of a host, for listeners and for checks whether a port is free.

The family of a host is never guessed from its spelling: a name may have addresses of either family, or of both, and a
kernel may lack one of them.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import trio

SocketAddress: TypeAlias = tuple[socket.AddressFamily, tuple[object, ...]]
"""A family, and an address of it as `bind` takes it: host, port and, of IPv6, two numbers."""


def resolve(host: str) -> Sequence[SocketAddress]:
    """Return all addresses of a host, every address for an empty one; blocks, and raises `OSError`."""
    infos = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in infos]


async def resolved(host: str) -> Sequence[SocketAddress]:
    """Return the same without blocking the event loop."""
    infos = await trio.socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in infos]


def bind_all(
    addresses: Iterable[SocketAddress], port: int, *, shared: bool = False, backlog: int | None = None
) -> list[socket.socket]:
    """Return a socket bound to each address, except to those of a family that the kernel lacks; raises `OSError`.

    With `shared` other processes may bind the port too. Without a `backlog` the sockets do not listen yet.
    """
    sockets, unsupported = list[socket.socket](), OSError(errno.EADDRNOTAVAIL, "the host has no address")
    try:
        for family, (host, _, *rest) in addresses:
            try:
                bound = socket.socket(family)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:
                    raise
                unsupported = error
                continue
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((host, port, *rest))
            if backlog is not None:
                bound.listen(backlog)
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    if not sockets:
        raise unsupported
    return sockets


async def bound_sockets(
    port: int, host: str, *, shared: bool = False, backlog: int | None = None
) -> list[trio.socket.SocketType]:
    """Return sockets bound to all addresses of a host; raises `OSError`."""
    bound = bind_all(await resolved(host), port, shared=shared, backlog=backlog)
    return [trio.socket.from_stdlib_socket(each) for each in bound]
