"""The network of fetches: names to addresses, connections to addresses. Tests replace it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Protocol

import trio
from attrs import define, field

from actors.kit.fair_budget import FairBudget
from actors.kit.shares import BudgetLimits
from supervisor.media.addresses import IpAddress
from supervisor.threads.shared_threads import SharedThreads

ADDRESSES_MAX = 8  # tried addresses of one name
RESOLVERS_MAX = 8  # threads: a thread at a dead name server cannot be ended


def resolvers_budget() -> FairBudget:
    """Return a budget of the threads that resolve names."""
    return FairBudget("a thread to resolve a name", BudgetLimits.of_places(RESOLVERS_MAX))


class FetchNetwork(Protocol):
    """The network interface of a fetch; each method raises `OSError`."""

    async def resolve(self, host: str, port: int, *, owner: str, within_s: float) -> Sequence[IpAddress]:
        """Return the addresses of a host; raises `TooSlowError`, or `Overloaded` if it cannot begin in time."""

    async def connect(self, address: IpAddress, port: int) -> trio.abc.Stream:
        """Return a connection to an address, and to no other."""


@define(eq=False)
class SystemNetwork:
    """The network of this machine."""

    threads: SharedThreads = field(factory=lambda: SharedThreads(resolvers_budget()))

    async def resolve(self, host: str, port: int, *, owner: str, within_s: float) -> Sequence[IpAddress]:
        """Return the addresses of a host, by the resolver of the system, in a thread."""

        def look_up() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [str(place[0]) for _, _, _, _, place in found]

        texts = await self.threads.run(look_up, owner=owner, wait_s=within_s, within_s=within_s)
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
