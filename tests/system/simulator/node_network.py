"""The network between nodes: listeners by address, and the wires of links, which may be cut, half-open or slow to deliver."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from typing import Any, cast

import trio
from attrs import Factory, define, field, frozen

from protocol.errors import PeerLost
from supervisor.links.endpoint import Endpoint
from supervisor.links.websocket import ConnectionHandler, WebSocketTransport
from tests.rig.network import SimTransport, sim_pair

SIZE_BYTES = 4


@define(eq=False)
class _Stream:
    """The stream below a WebSocket; here the transport itself knows how it ended."""

    end_reason: str = ""

    def lift_limit(self) -> None:
        """Receive more than a greeting, which is never limited here."""


@define(eq=False)
class SimWire:
    """One end of a connection that carries whole messages; like `supervisor.links.websocket.WebSocketTransport`."""

    transport: SimTransport
    stream: _Stream = Factory(_Stream)
    _buffer: bytearray = Factory(bytearray)

    async def send_all(self, data: bytes) -> None:
        await self.transport.send_all(len(data).to_bytes(SIZE_BYTES) + data)

    async def receive_some(self) -> bytes:
        while (end := self._end()) is None:
            if not (more := await self.transport.receive_some()):
                return b""
            self._buffer += more
        message = bytes(self._buffer[SIZE_BYTES:end])
        del self._buffer[:end]
        return message

    def acknowledged_s(self) -> float:
        return self.transport.acknowledged_s()

    def close(self) -> None:
        if not self.transport.swallows:  # else the news of it does not come either
            self.transport.close()

    def _end(self) -> int | None:
        end = SIZE_BYTES + int.from_bytes(self._buffer[:SIZE_BYTES])
        return end if SIZE_BYTES <= len(self._buffer) >= end else None


@define(eq=False)
class Accepted:
    """The listener's end before the first byte, as `supervisor.cluster.mesh` gets it from the kernel."""

    transport: SimTransport
    socket: Accepted = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.socket = self

    def getpeername(self) -> tuple[str, int]:
        raise OSError


@frozen
class Connection:
    """A connection that was made, and between which nodes."""

    dialer: str
    listener: str
    transport: SimTransport  # the dialer's end
    far: SimTransport

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset((self.dialer, self.listener))


@define(eq=False)
class NodeNetwork:
    """All that lies between the nodes."""

    rng: random.Random
    network: dict[str, Any]
    listening: dict[str, tuple[str, Callable[[trio.SocketStream], None]]] = Factory(
        dict
    )  # by address: the node, and its accept function
    connections: list[Connection] = Factory(list)
    stopped: dict[str, float] = Factory(dict)  # until when the process of a node stands still

    async def dial(
        self, dialer: str, at: Endpoint, _: ssl.SSLContext | None, within_s: float, talk: ConnectionHandler
    ) -> None:
        """Do what `supervisor.links.websocket.dial` does."""
        await trio.sleep(self.rng.random() * self.network["delay_s"])
        await trio.sleep_until(max(self.stopped.get(dialer, 0.0), trio.current_time()))
        if str(at) not in self.listening:
            raise PeerLost(f"{at} cannot be reached: it does not listen")
        listener, accept = self.listening[str(at)]
        near, far = sim_pair(self.rng, **self.network)
        self.connections.append(Connection(dialer, listener, near, far))
        near.stall(self.stopped.get(listener, 0.0))  # its kernel accepts all the same
        accept(cast("trio.SocketStream", Accepted(far)))
        await self._talked(near, talk)

    async def accepted(
        self, stream: trio.SocketStream, _: ssl.SSLContext | None, within_s: float, talk: ConnectionHandler
    ) -> None:
        """Do what `supervisor.links.websocket.accepted` does."""
        await self._talked(cast("Accepted", stream).transport, talk)

    async def _talked(self, transport: SimTransport, talk: ConnectionHandler) -> None:
        wire = SimWire(transport)
        try:
            await talk(cast("WebSocketTransport", wire))
        finally:
            wire.close()

    def stop(self, node: str, until: float) -> None:
        """Let the process of a node stand still for a while: nothing comes from it, and what comes to it waits."""
        self.stopped[node] = until
        for transport in self.transports(node):
            transport.stall(until)

    def mute(self, node: str, until: float) -> None:
        """Let nothing of what a node says come before some time, on the connections that it has now."""
        for each in self.connections:
            if node in each.nodes:
                (each.transport if node == each.dialer else each.far).mute(until)

    def transports(self, *nodes: str) -> list[SimTransport]:
        """Return the connections of a node, or between two."""
        return [connection.transport for connection in self.connections if set(nodes) <= connection.nodes]

    def cut(self, *nodes: str) -> None:
        """Break the connections of a node, or between two; they may be made again at once."""
        for transport in self.transports(*nodes):
            transport.cut()
        self.connections = [connection for connection in self.connections if not set(nodes) <= connection.nodes]
