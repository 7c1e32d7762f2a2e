"""What all connections of a gateway share: the limits, who may knock, and the drain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Protocol
from urllib.parse import urlsplit

import trio
from attrs import define, field, frozen

from actors.processor import TextReply
from protocol.dialects.options import Within
from protocol.errors import Draining, Forbidden
from protocol.messages import Finished, Respond
from supervisor.doors.asking import Asking, Counted, Served
from supervisor.doors.gate import Gate
from supervisor.doors.outbox import Outbox

Seconds = Annotated[float, Within(above=0, at_most=1_000_000)]
Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]
Headers = Sequence[tuple[bytes, bytes]]


@frozen
class DoorLimits:
    """Every limit of the doors; a full one is a clear error or a clear close code."""

    connections_max: Count = 1024
    head_bytes_max: Count = 32 * 1024
    body_bytes_max: Count = 4 * 1024 * 1024  # of an HTTP request, or of one WebSocket message
    backlog_bytes_max: Count = 1024 * 1024  # that a client has not read yet
    send_buffer_bytes: Count = 256 * 1024  # in the kernel, beside the backlog
    queued_max: Count = 16  # responses that wait for their turn on one WebSocket
    head_s: Seconds = 10.0
    body_s: Seconds = 30.0
    idle_s: Seconds = 75.0  # between two requests of one HTTP connection
    stall_s: Seconds = 30.0  # that a client with a backlog may read nothing
    close_s: Seconds = 2.0
    connection_s_max: Seconds = 3600.0  # of one WebSocket


class Drainable(Protocol):
    """A connection that can be told to end when it is idle."""

    def drain(self) -> None:
        """End as soon as nothing is being answered."""


@define(eq=False)
class Door:
    """One gateway's connections and what they need."""

    asking: Asking
    gate: Gate
    limits: DoorLimits
    names: frozenset[str]  # names that clients may call this server by, without the port
    unready: Callable[[], str | None]  # why a load balancer had better not send anybody here now
    metrics_text: Callable[[], Awaitable[bytes]]
    new_id: Callable[[], str]
    now: Callable[[], float]
    port: int | None = None  # once the gateway listens
    connections: dict[Outbox, Drainable] = field(factory=dict)  # one each, whatever it speaks by now
    _left: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def check_caller(self, headers: Headers) -> None:
        """Raise `Forbidden` for a foreign `Host` or `Origin`: any web page can make a browser knock at localhost."""
        given = dict(headers)
        host = given.get(b"host", b"").decode("latin-1")
        if _hostname(f"//{host}") not in self.names:
            raise Forbidden(f"this server does not answer to the host {host!r}")
        origin = given.get(b"origin")
        if origin is not None and _hostname(origin.decode("latin-1")) not in self.names:
            raise Forbidden(f"pages of {origin.decode('latin-1')!r} may not use this server")

    def drain(self) -> None:
        """Admit nothing new and let idle connections go; those that are answered end after their answer."""
        self.gate.drain()
        for connection in tuple(self.connections.values()):
            connection.drain()

    def cut(self) -> int:
        """End every answer that still runs with a retryable error, and return how many there were."""
        return self.asking.cut_all(Draining("the server is shutting down"))

    async def answer(
        self, request: Respond, served: Served, counted: Counted, into: Callable[[TextReply], None]
    ) -> Finished:
        """Admit one request and relay its answer into `into`; raises the `RequestError` that ended it."""
        with self.asking.counting(counted):
            async with self.gate.admitted():
                finished = await self.asking.answer(request, served, counted, into)
        return finished

    def forget(self, outbox: Outbox) -> None:
        """Note that a connection has ended."""
        del self.connections[outbox]
        if not self.connections:
            self._left.unpark_all()

    async def wait_left(self) -> None:
        """Wait until every connection has ended."""
        await trio.lowlevel.checkpoint()
        while self.connections:
            await self._left.park()


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
