"""A host that takes and gives tensors: the real messages of an engine's host, at the far end of a simulated link."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import trio
from attrs import Factory, define, field, frozen
from trio.testing import wait_all_tasks_blocked

from actors.engines.host.link_messages import HostStatistics, LinkMessages
from protocol.errors import AskerLeft, EngineLost, PeerLost, PeerViolation, RequestError
from protocol.link.frames import Cancel, Frame, Open
from protocol.link.peer import Peer, PeerStatistics
from protocol.messages.kind import Message
from supervisor.links.link import Link
from supervisor.tensors.shared_memory import SharedMemory, SharedStatistics
from supervisor.tensors.shared_road import SharedMemoryRoad
from tests.rig.network import SimTransport, sim_pair

Service: TypeAlias = Callable[[Message], Awaitable[Message]]


@define(eq=False)
class TensorHost:
    """Answers each request by `service`, in a task of its own; with `deaf` it reads nothing."""

    transport: SimTransport
    service: Service
    shared_bytes_max: int = 512 * 1024 * 1024
    lease_s: float = 30.0
    deaf: bool = False
    peer: Peer = Factory(lambda: Peer("host", serves_max=64))
    messages: LinkMessages = field(init=False)
    _running: dict[int, trio.CancelScope] = field(factory=dict, init=False)
    _nursery: trio.Nursery = field(init=False)
    _writer: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def __attrs_post_init__(self) -> None:
        self.messages = LinkMessages(self.peer, self._call_later, self.shared_bytes_max, self.lease_s)

    async def run(self) -> None:
        """Serve until the link ends."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._write)
            while data := await self.transport.receive_some():
                while self.deaf:  # noqa: ASYNC110  # a test sets it
                    await trio.sleep(1)
                for frame in self.peer.receive_data(data):
                    self._received(frame)
                self._writer.unpark_all()
            self._nursery.cancel_scope.cancel()

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                try:
                    request = self.messages.request(frame)
                except RequestError as error:
                    self.messages.fail(frame.stream, error)
                else:
                    scope = self._running[frame.stream] = trio.CancelScope()
                    self._nursery.start_soon(self._serve, frame.stream, request, scope)
            case Cancel():
                self.messages.taken(frame.stream)
                if (running := self._running.get(frame.stream)) is not None:
                    running.cancel()
            case _:
                pass

    async def _serve(self, stream: int, request: Message, scope: trio.CancelScope) -> None:
        error: RequestError = AskerLeft("the asker left")
        result: Message | None = None
        with scope:
            try:
                result = await self.service(request)
            except RequestError as raised:
                error = raised
        del self._running[stream], request
        self.messages.fail(stream, error) if result is None else self.messages.end(stream, result)
        self._writer.unpark_all()

    def _call_later(self, delay: float, callback: Callable[[int], None], stream: int) -> None:
        async def later() -> None:
            await trio.sleep(delay)
            callback(stream)

        self._nursery.start_soon(later)

    async def _write(self) -> None:
        while True:
            while data := self.peer.data_to_send():
                await self.transport.send_all(data)
            await self._writer.park()


@frozen
class NearHost:
    """A host, the link to it, the memory of its node, and the transport of the node's end."""

    host: TensorHost
    link: Link
    memory: SharedMemory
    transport: SimTransport

    async def check_nothing_held(self) -> None:
        """Check that neither process holds a stream, a byte or a region; what has failed is garbage first."""
        await wait_all_tasks_blocked()
        gc.collect()
        assert self.memory.statistics() == SharedStatistics()
        assert self.host.messages.statistics() == HostStatistics()
        assert self.link.peer.statistics() == self.host.peer.statistics() == PeerStatistics()
        assert self.link.statistics().answers == 0


@asynccontextmanager
async def near_host(
    service: Service,
    *,
    bytes_max: int = 512 * 1024 * 1024,
    lease_s: float = 30.0,
    process: int | None = None,
    host_bytes_max: int = 512 * 1024 * 1024,
) -> AsyncIterator[NearHost]:
    """Run a host that shares memory with its node, and the link to it."""
    near, far = sim_pair()
    memory = SharedMemory(bytes_max)
    host = TensorHost(far, service, host_bytes_max, lease_s)
    road = SharedMemoryRoad(memory, lease_s, process)
    link = Link(near, Peer("node", serves_max=0), lost_error=EngineLost, road=road)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        nursery.start_soon(_carry, link)
        await link.wait_ready()
        yield NearHost(host, link, memory, near)
        nursery.cancel_scope.cancel()


async def _carry(link: Link) -> None:
    with suppress(PeerLost, PeerViolation):
        await link.run()
