"""Connections that have not shown yet who they are: those that make room when there is none.

Whoever has a key must not be kept out by those who have none, however many they are and however slowly they speak. A
client's connection is a stranger until one of its requests has been let in by its key (or, where no keys are wanted, at
all), a node's until it has proved its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from ipaddress import ip_address
from typing import Generic, TypeVar

import trio
from attrs import define, field

One = TypeVar("One", bound=Hashable)

SITE_BYTES = 8  # of an IPv6 address: whoever has one has as many as it likes of the same first half


@define(eq=False)
class UnauthenticatedConnections(Generic[One]):
    """Every stranger in the order in which they came, in all and by address."""

    _all: OrderedDict[One, str] = field(factory=OrderedDict)
    _by_address: dict[str, OrderedDict[One, trio.CancelScope]] = field(factory=dict)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __iter__(self) -> Iterator[One]:
        """Yield each in the order in which they came."""
        return iter(tuple(self._all))

    def add(self, stranger: One, address: str, scope: trio.CancelScope) -> None:
        """Note one who has come; to cancel its scope ends it."""
        self._all[stranger] = address
        self._by_address.setdefault(address, OrderedDict())[stranger] = scope

    def remove(self, stranger: One) -> trio.CancelScope | None:
        """Forget one that is gone, or is none any more; return its scope if it was one."""
        if (address := self._all.pop(stranger, None)) is None:
            return None
        scope = self._by_address[address].pop(stranger)
        if not self._by_address[address]:
            del self._by_address[address]
        return scope

    def of(self, address: str) -> int:
        """Return how many have come from an address."""
        return len(self._by_address.get(address, ()))

    def close_oldest(self, address: str | None = None) -> One | None:
        """End the stranger that came first, of an address or of all, and return it, None if there is none."""
        among = self._all if address is None else self._by_address.get(address, ())
        if (oldest := next(iter(among), None)) is None:
            return None
        scope = self.remove(oldest)
        assert scope is not None  # it was one
        scope.cancel(reason="others need its place")
        return oldest

    def close_oldest_of_busiest_address(self) -> One | None:
        """End the stranger that came first of the address that has most here, and return it, None if there is none.

        Of addresses that have as many it is the one whose first came first.
        """
        most = max(map(len, self._by_address.values()), default=0)
        address = next((each for each in self._all.values() if len(self._by_address[each]) == most), None)
        return None if address is None else self.close_oldest(address)


def address_of(stream: trio.SocketStream) -> str:
    """Return from where a client comes, as far as its connections are counted: "" stands for this host itself.

    All behind one proxy are one address. Of IPv6 the first half counts.
    """
    try:
        address = ip_address(str(stream.socket.getpeername()[0]).partition("%")[0])
    except (OSError, ValueError, IndexError):  # it is gone already, or it came by another way than the network
        return ""
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    return str(address) if address.version == 4 else address.packed[:SITE_BYTES].hex()
