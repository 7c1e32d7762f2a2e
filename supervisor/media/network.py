"""The network of fetches: names to addresses, connections to addresses. Tests replace it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Protocol

import trio
from attrs import define, field

from supervisor.media.addresses import IpAddress

ADDRESSES_MAX = 8  # tried addresses of one name
RESOLVERS_MAX = 8  # threads: a thread at a dead name server cannot be ended


class FetchNetwork(Protocol):
    """The network interface of a fetch; each method raises `OSError`."""

    async def resolve(self, host: str, port: int) -> Sequence[IpAddress]:
        """Return the addresses of a host."""

    async def connect(self, address: IpAddress, port: int) -> trio.abc.Stream:
        """Return a connection to an address, and to no other."""


@define(eq=False)
class SystemNetwork:
    """The network of this machine."""

    _threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(RESOLVERS_MAX))

    async def resolve(self, host: str, port: int) -> Sequence[IpAddress]:
        """Return the addresses of a host, by the resolver of the system, in a thread."""

        def look_up() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [str(place[0]) for _, _, _, _, place in found]

        texts = await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=self._threads)
        return [ip_address(text.partition("%")[0]) for text in dict.fromkeys(texts)][:ADDRESSES_MAX]

    async def connect(self, address: IpAddress, port: int) -> trio.abc.Stream:
        """Return a TCP connection to an address, without any name on the way."""
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        connection = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            await connection.connect((str(address), port))
        except BaseException:
            connection.close()
            raise
        return trio.SocketStream(connection)
