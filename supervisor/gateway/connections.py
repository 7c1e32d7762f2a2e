"""The open connections of a gateway: how many there may be, by which key each is counted, and waiting for their end.

A connection is counted from its start to its end, as HTTP and as WebSocket. Until one of its requests has been
authorized it may be closed to make room for others: a client with a key must not be kept out by clients without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import trio
from attrs import define, field

from actors.kit.shares import owner_part
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.outbox import Outbox
from supervisor.sockets.unauthenticated import UnauthenticatedConnections
from supervisor.telemetry.metrics import Metrics

AWAITED_POLL_S = 0.05  # in a drain: a connection is also no longer awaited once its time for a first message is over


class Connection(Protocol):
    """The HTTP or WebSocket side of one client's connection."""

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""

    @property
    def awaited(self) -> bool:
        """Whether its first request, or the rest of one that has begun to come, is still to be served in a drain."""

    def drain(self) -> None:
        """End as soon as nothing is being answered."""

    def refuse_partial(self) -> None:
        """Refuse a request of which a part has been received."""


@define(eq=False)
class Connections:
    """All open connections, by the outbox of their client."""

    limits: Callable[[], GatewayLimits]
    metrics: Metrics
    several_keys: Callable[[], bool]
    _open: dict[Outbox, Connection] = field(factory=dict)
    _unauthenticated: UnauthenticatedConnections[Outbox] = field(factory=UnauthenticatedConnections)
    _keys: dict[Outbox, ClientKey] = field(factory=dict)  # by which authenticated connections are counted
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[Outbox]:
        """Yield the outbox of each."""
        return iter(tuple(self._open))

    def make_room(self, address: str) -> bool:
        """Return whether one more may come from an address, if need be by closing one that is not authenticated."""
        limits, closed = self.limits(), None
        if address and self._unauthenticated.count_from(address) >= limits.address_connections_max:
            closed = self._unauthenticated.close_oldest(address)
        elif len(self) >= limits.connections_max and (closed := self._unauthenticated.close_oldest()) is None:
            return False
        if closed is not None:
            self.remove(closed)
            self.metrics.client_dropped("unauthenticated")
        return len(self) < limits.connections_max

    def add(self, outbox: Outbox, connection: Connection, address: str, scope: trio.CancelScope) -> None:
        """Count a new connection; cancelling its scope ends it."""
        self._open[outbox] = connection
        self._unauthenticated.add(outbox, address, scope)

    def upgrade(self, outbox: Outbox, connection: Connection) -> None:
        """Replace an HTTP connection by the WebSocket session that it has become."""
        self._open[outbox] = connection

    def authenticated(self, outbox: Outbox, key: ClientKey | None) -> None:
        """Count a connection as authenticated, and by its key unless no key is wanted.

        Raises `ConcurrencyLimited` if the key has as many connections as it may. The connection is then counted as
        before, so it can still be closed to make room.
        """
        owner = self._keys.get(outbox)
        if key is not None and key is not owner:
            limits = self.limits()
            part = owner_part(limits.connections_max) if self.several_keys() else limits.connections_max
            key.add_connection(limits.key_connections_max, part)
            if owner is not None:
                owner.connections -= 1
            self._keys[outbox] = key
        self._unauthenticated.remove(outbox)

    def remove(self, outbox: Outbox) -> None:
        """Stop counting a connection: it has ended, or will as soon as its task runs."""
        self._open.pop(outbox, None)
        self._unauthenticated.remove(outbox)
        if (key := self._keys.pop(outbox, None)) is not None:
            key.connections -= 1
        self._changed.unpark_all()

    def drain(self) -> None:
        """Have every connection end as soon as nothing is being answered over it."""
        for connection in tuple(self._open.values()):
            connection.drain()

    def refuse_partial(self) -> None:
        """Refuse every request of which a part has been received."""
        for connection in tuple(self._open.values()):
            connection.refuse_partial()

    async def wait_received(self) -> None:
        """Wait until no connection's first request, nor the rest of any other, is awaited; each has limits for that."""
        await trio.lowlevel.checkpoint()
        while any(connection.awaited for connection in self._open.values()):  # noqa: ASYNC110  # some end by their time
            await trio.sleep(AWAITED_POLL_S)

    async def wait_idle(self) -> None:
        """Wait until nothing is being answered and no backlog is left; only in a drain, which ends idle connections."""
        await trio.lowlevel.checkpoint()
        while any(connection.busy or outbox.backlog_bytes for outbox, connection in self._open.items()):
            await self._changed.park()

    async def wait_closed(self) -> None:
        """Wait until every connection has ended."""
        await trio.lowlevel.checkpoint()
        while self._open:
            await self._changed.park()
