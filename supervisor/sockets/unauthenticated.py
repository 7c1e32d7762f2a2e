"""Unauthenticated connections, which are closed to make room for others.

Peers without a key must not keep others out by many connections or slow ones. A client's connection is unauthenticated
until a key has authorized one of its requests (without keys, until its first request), a node's until it has proved its
name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from ipaddress import ip_address
from typing import Generic, TypeVar

import trio
from attrs import define, field

ConnectionT = TypeVar("ConnectionT", bound=Hashable)

SITE_BYTES = 8  # the first half of an IPv6 address: one host can use any address behind it


@define(eq=False)
class UnauthenticatedConnections(Generic[ConnectionT]):
    """All unauthenticated connections, the oldest first, in all and by address."""

    _all: OrderedDict[ConnectionT, str] = field(factory=OrderedDict)  # the address of each
    _by_address: dict[str, OrderedDict[ConnectionT, trio.CancelScope]] = field(factory=dict)

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._all)

    def __iter__(self) -> Iterator[ConnectionT]:
        """Yield the connections, the oldest first."""
        return iter(tuple(self._all))

    def add(self, connection: ConnectionT, address: str, scope: trio.CancelScope) -> None:
        """Add a new connection; cancelling its scope ends it."""
        self._all[connection] = address
        self._by_address.setdefault(address, OrderedDict())[connection] = scope

    def remove(self, connection: ConnectionT) -> trio.CancelScope | None:
        """Remove a connection that has ended or authenticated, and return its scope; None if it was not here."""
        if (address := self._all.pop(connection, None)) is None:
            return None
        scope = self._by_address[address].pop(connection)
        if not self._by_address[address]:
            del self._by_address[address]
        return scope

    def count_from(self, address: str) -> int:
        """Return the number of connections from an address."""
        return len(self._by_address.get(address, ()))

    def close_oldest(self, address: str | None = None) -> ConnectionT | None:
        """End the oldest connection, of an address or of all, and return it, None if there is none."""
        among = self._all if address is None else self._by_address.get(address, ())
        if (oldest := next(iter(among), None)) is None:
            return None
        scope = self.remove(oldest)
        assert scope is not None  # it was found here
        scope.cancel(reason="others need its place")
        return oldest

    def close_oldest_of_busiest_address(self) -> ConnectionT | None:
        """End the oldest connection of the address with the most, and return it, None if there is none.

        Among equal addresses it is the one with the oldest connection.
        """
        largest = max(map(len, self._by_address.values()), default=0)
        address = next((address for address in self._all.values() if len(self._by_address[address]) == largest), None)
        return None if address is None else self.close_oldest(address)


def address_of(stream: trio.SocketStream) -> str:
    """Return a client's address for counting its connections, "" for clients on this host.

    All clients behind one proxy have one address. Only the first half of an IPv6 address counts.
    """
    try:
        address = ip_address(str(stream.socket.getpeername()[0]).partition("%")[0])
    except (OSError, ValueError, IndexError):  # the client is gone already, or this is no network socket
        return ""
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    return str(address) if address.version == 4 else address.packed[:SITE_BYTES].hex()
