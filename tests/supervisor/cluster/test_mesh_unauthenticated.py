"""Connections that have proved nothing yet: whoever makes many of them is in the way of itself alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import trio
from attrs import evolve

from supervisor.cluster import mesh
from tests.rig.nodes import LOOPBACK_HOSTS, QUICK, UPGRADE, Node, all_linked, linked_nodes, until

pytestmark = pytest.mark.realtime  # many sockets of loopback


class Crowd:
    """Connections to a node, of which some come from afar: all of loopback is one address else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.far, self.streams = set(), []
        monkeypatch.setattr(mesh, "address_of", self.address_of, raising=False)

    def address_of(self, stream) -> str:
        with suppress(OSError):
            return "far" if stream.socket.getpeername()[1] in self.far else ""
        return ""

    async def connect(self, node, *, far: bool) -> trio.SocketStream:
        stream = trio.SocketStream(trio.socket.socket())
        self.streams.append(stream)
        await stream.socket.bind((LOOPBACK_HOSTS, 0))
        (self.far.add if far else self.far.discard)(stream.socket.getsockname()[1])
        await stream.socket.connect((LOOPBACK_HOSTS, node.links.port))
        return stream

    async def connect_without_end(self, node) -> None:
        while True:
            await self.connect(node, far=True)
            if len(self.streams) > 100:
                self.streams.pop(0).socket.close()


@pytest.fixture
async def crowd(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowd]:
    await trio.lowlevel.checkpoint()
    made = Crowd(monkeypatch)
    yield made
    for stream in made.streams:
        stream.socket.close()


@pytest.fixture
def patient() -> Node:
    return Node("b", section=evolve(QUICK, handshake_s=60.0))


async def test_d9_a_slow_node_keeps_its_place_however_many_come_from_elsewhere(crowd: Crowd, patient: Node) -> None:
    async with linked_nodes(patient):
        slow = await crowd.connect(patient, far=False)
        for _ in range(4 * QUICK.handshakes_max):
            await crowd.connect(patient, far=True)
        await until(lambda: patient.links.statistics().unauthenticated == QUICK.handshakes_max)
        with trio.fail_after(5):
            await slow.send_all(UPGRADE)
            assert b" 101 " in await slow.receive_some()
            assert not await crowd.streams[1].receive_some(), "the oldest of the others is gone"


async def test_d9_nodes_link_while_one_address_connects_without_end(crowd: Crowd, patient: Node) -> None:
    a = Node("a")
    async with linked_nodes(patient) as nursery:
        for _ in range(4):
            nursery.start_soon(crowd.connect_without_end, patient)
        await until(lambda: patient.links.statistics().unauthenticated == QUICK.handshakes_max)
        a.directory.configure("b", patient.at)
        await nursery.start(a.run)
        await all_linked(a, patient)
