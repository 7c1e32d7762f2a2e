"""Connections that have presented no key yet: those that make room when there is none.

Whoever has a key must not be kept out by those who have none, however many they are and however slowly they speak. A
connection is a stranger until one of its requests has been let in by its key (or, where no keys are wanted, at all).
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import ip_address

import trio
from attrs import define, field

from supervisor.doors.outbox import Outbox

SITE_BYTES = 8  # of an IPv6 address: whoever has one has as many as it likes of the same first half


@define(eq=False)
class Strangers:
    """Every stranger in the order in which they came, in all and by address."""

    _all: OrderedDict[Outbox, str] = field(factory=OrderedDict)
    _by_address: dict[str, OrderedDict[Outbox, trio.CancelScope]] = field(factory=dict)

    def add(self, outbox: Outbox, address: str, scope: trio.CancelScope) -> None:
        """Note one who has come; to cancel its scope ends it."""
        self._all[outbox] = address
        self._by_address.setdefault(address, OrderedDict())[outbox] = scope

    def remove(self, outbox: Outbox) -> trio.CancelScope | None:
        """Forget one that is gone, or is none any more; return its scope if it was one."""
        if (address := self._all.pop(outbox, None)) is None:
            return None
        scope = self._by_address[address].pop(outbox)
        if not self._by_address[address]:
            del self._by_address[address]
        return scope

    def of(self, address: str) -> int:
        """Return how many have come from an address."""
        return len(self._by_address.get(address, ()))

    def end_oldest(self, address: str | None = None) -> Outbox | None:
        """End the stranger that came first, of an address or of all, and return it, None if there is none."""
        among = self._all if address is None else self._by_address.get(address, ())
        if (oldest := next(iter(among), None)) is None:
            return None
        scope = self.remove(oldest)
        assert scope is not None  # it was one
        scope.cancel(reason="others need its place")
        return oldest


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
