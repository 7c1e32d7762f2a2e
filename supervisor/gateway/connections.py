"""The open connections of a gateway: how many there may be, in whose name each is counted, and waiting for their end.

A connection is counted from its first byte to its last, whatever it speaks by then. Until one of its requests has been
let in it is closed to make room for others: a client with a key must not be kept out by clients that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import trio
from attrs import define, field

from supervisor.config.limits import GatewayLimits
from supervisor.gateway.keys import Key
from supervisor.gateway.outbox import Outbox
from supervisor.sockets.unauthenticated import UnauthenticatedConnections
from supervisor.telemetry.metrics import Metrics


class Connection(Protocol):
    """What speaks with one client, by HTTP or by WebSocket."""

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""

    def drain(self) -> None:
        """End as soon as nothing is being answered."""

    def refuse_partial(self) -> None:
        """Refuse a request that has come in part."""


@define(eq=False)
class Connections:
    """Every connection by the outbox of its client."""

    limits: Callable[[], GatewayLimits]
    metrics: Metrics
    _open: dict[Outbox, Connection] = field(factory=dict)
    _unauthenticated: UnauthenticatedConnections[Outbox] = field(factory=UnauthenticatedConnections)
    _keys: dict[Outbox, Key] = field(factory=dict)  # in whose name a connection is counted
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[Outbox]:
        """Yield the outbox of each."""
        return iter(tuple(self._open))

    def make_room(self, address: str) -> bool:
        """Return whether one more may come from an address, if need be in place of one that is not authenticated."""
        limits, closed = self.limits(), None
        if address and self._unauthenticated.of(address) >= limits.address_connections_max:
            closed = self._unauthenticated.close_oldest(address)
        elif len(self) >= limits.connections_max and (closed := self._unauthenticated.close_oldest()) is None:
            return False
        if closed is not None:
            self.remove(closed)
            self.metrics.client_dropped("stranger")
        return len(self) < limits.connections_max

    def add(self, outbox: Outbox, connection: Connection, address: str, scope: trio.CancelScope) -> None:
        """Count a connection that has come; to cancel its scope ends it."""
        self._open[outbox] = connection
        self._unauthenticated.add(outbox, address, scope)

    def upgrade(self, outbox: Outbox, connection: Connection) -> None:
        """Put in place of an HTTP connection the WebSocket that it has become."""
        self._open[outbox] = connection

    def authenticated(self, outbox: Outbox, key: Key | None) -> None:
        """Count a connection in the name of a key from now on, or of nobody where no key is wanted.

        Raises `ConcurrencyLimited` if the key has as many connections as it may.
        """
        self._unauthenticated.remove(outbox)
        owner = self._keys.get(outbox)
        if key is None or key is owner:
            return
        key.add_connection(self.limits().key_connections_max)
        if owner is not None:
            owner.connections -= 1
        self._keys[outbox] = key

    def remove(self, outbox: Outbox) -> None:
        """Count a connection no more: it has ended, or will as soon as its task runs."""
        self._open.pop(outbox, None)
        self._unauthenticated.remove(outbox)
        if (key := self._keys.pop(outbox, None)) is not None:
            key.connections -= 1
        self._changed.unpark_all()

    def drain(self) -> None:
        """Let each end as soon as nothing is being answered over it."""
        for connection in tuple(self._open.values()):
            connection.drain()

    def refuse_partial(self) -> None:
        """Refuse every request that has come in part."""
        for connection in tuple(self._open.values()):
            connection.refuse_partial()

    async def wait_idle(self) -> None:
        """Wait until nothing is being answered and no backlog is left: in a drain a connection ends with its answer."""
        await trio.lowlevel.checkpoint()
        while any(connection.busy or outbox.backlog_bytes for outbox, connection in self._open.items()):
            await self._changed.park()

    async def wait_closed(self) -> None:
        """Wait until every connection has ended."""
        await trio.lowlevel.checkpoint()
        while self._open:
            await self._changed.park()
