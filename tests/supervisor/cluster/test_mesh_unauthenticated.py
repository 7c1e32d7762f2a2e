"""Connections that have proved no name: they end soon, disturb nobody, and keep nobody out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from protocol.link import greeting
from protocol.link.frames import VERSION, KeepAlive, encode
from supervisor.cluster import mesh
from supervisor.links import websocket
from supervisor.links.handshake_stream import HANDSHAKE_BYTES_MAX
from tests.rig.nodes import (
    LOOPBACK,
    QUICK,
    UPGRADE,
    WITHIN_S,
    Node,
    Reasons,
    all_linked,
    dial,
    linked_nodes,
    raw_connection,
    read_to_end,
    undisturbed,
    until,
)

BYTES = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "another path": UPGRADE.replace(b"/link", b"/elsewhere"),
    "endless head": b"GET /link HTTP/1.1\r\nx: " + b"y" * (HANDSHAKE_BYTES_MAX + 1),
    "giant length": UPGRADE + b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + bytes(4) + b"x" * 100,
    "too much": UPGRADE + b"\x02\xff\x00\x00\x00\x00\x00\x10\x00\x00" + bytes(4) + bytes(HANDSHAKE_BYTES_MAX),
    "unmasked": UPGRADE + b"\x82\x02hi",
    "close": UPGRADE + b"\x88\x80" + bytes(4),
    "frames at once": UPGRADE + b"\x82\x86" + bytes(4) + encode(KeepAlive())[:6],
}


@pytest.mark.parametrize("name", BYTES)
async def test_other_bytes_than_a_greeting_end_a_connection_and_disturb_nobody(
    name: str, link_records: Callable[[], list[Any]], rather_slow: MockClock
) -> None:
    async with undisturbed() as a:

        async def connect() -> None:
            async with raw_connection(a, BYTES[name]) as stream:
                if name in {"nothing", "close"}:
                    await stream.send_eof()
                await read_to_end(stream)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(connect)
    assert 1 <= sum(record.peer == LOOPBACK for record in link_records()) <= 2


@pytest.mark.parametrize("origin", [b"Origin: https://elsewhere.example", b"origin: null", b"ORIGIN: http://127.0.0.1"])
async def test_no_page_in_a_browser_opens_a_link(origin: bytes, reasons: Reasons, rather_slow: MockClock) -> None:
    a = Node("a")
    async with linked_nodes(a), raw_connection(a, UPGRADE[:-2] + origin + b"\r\n\r\n") as stream:
        response = await read_to_end(stream)
        await until(reasons)
        assert a.linked == set()
    assert b" 403 " in response.splitlines()[0]
    assert reasons() == ["a web page asked for a link"]


async def test_a_handshake_has_a_time_limit_as_a_whole(rather_slow: MockClock) -> None:
    a = Node("a", section=evolve(QUICK, handshake_s=0.2))
    async with linked_nodes(a), raw_connection(a) as stream:
        with trio.fail_after(WITHIN_S), pytest.raises(trio.BrokenResourceError):
            for byte in UPGRADE:
                await stream.send_all(bytes((byte,)))
                await trio.sleep(0.05)


async def test_reasons_that_unauthenticated_connections_vary_do_not_fill_the_log(
    reasons: Reasons, rather_slow: MockClock
) -> None:
    a = Node("a")
    async with linked_nodes(a):
        for number in range(100):

            async def greet(transport: websocket.WebSocketTransport, number: int = number) -> None:
                await transport.send_all(greeting.encode(greeting.Greeting(VERSION, f"c{number}", "x", bytes(32))))
                while await transport.receive_some():
                    pass

            await dial(a, greet)
        await until(lambda: not a.links.statistics().unauthenticated)
    assert 10 <= len(reasons()) <= 60


# Many of them -------------------------------------------------------------------------------


class Crowd:
    """Connections to a node, some of which count as those of another address: all of loopback is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.far: set[int] = set()
        self.streams: list[trio.SocketStream] = []
        monkeypatch.setattr(mesh, "address_of", self.address_of, raising=False)

    def address_of(self, stream: trio.SocketStream) -> str:
        with suppress(OSError):
            return "far" if stream.socket.getpeername()[1] in self.far else ""
        return ""

    async def connect(self, node: Node, *, far: bool) -> trio.SocketStream:
        stream = trio.SocketStream(trio.socket.socket())
        self.streams.append(stream)
        await stream.socket.bind((LOOPBACK, 0))
        (self.far.add if far else self.far.discard)(stream.socket.getsockname()[1])
        await stream.socket.connect((LOOPBACK, node.links.port))
        return stream

    async def connect_without_end(self, node: Node) -> None:
        while True:
            await self.connect(node, far=True)
            if len(self.streams) > 100:
                self.streams.pop(0).socket.close()


@pytest.fixture
async def crowd(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowd]:
    await trio.lowlevel.checkpoint()
    crowd = Crowd(monkeypatch)
    yield crowd
    for stream in crowd.streams:
        stream.socket.close()


@pytest.fixture
def patient() -> Node:
    return Node("b", section=evolve(QUICK, handshake_s=60.0))


async def test_two_hundred_silent_connections_keep_no_node_out(
    crowd: Crowd, patient: Node, reasons: Reasons, rather_slow: MockClock
) -> None:
    a = Node("a")
    async with linked_nodes(patient) as nursery:
        for _ in range(200):
            await crowd.connect(patient, far=False)
        await until(lambda: patient.links.statistics().unauthenticated == QUICK.handshakes_max)
        a.knows(patient)
        await nursery.start(a.run)
        await all_linked(a, patient)
        for stream in crowd.streams:
            await trio.aclose_forcefully(stream)
        await until(lambda: not patient.links.statistics().unauthenticated)
    assert len(reasons()) <= 2


async def test_a_slow_node_keeps_its_place_however_many_connect_from_another_address(
    crowd: Crowd, patient: Node, rather_slow: MockClock
) -> None:
    async with linked_nodes(patient):
        slow = await crowd.connect(patient, far=False)
        for _ in range(4 * QUICK.handshakes_max):
            await crowd.connect(patient, far=True)
        await until(lambda: patient.links.statistics().unauthenticated == QUICK.handshakes_max)
        with trio.fail_after(WITHIN_S):
            await slow.send_all(UPGRADE)
            assert b" 101 " in await slow.receive_some()
            assert not await crowd.streams[1].receive_some(), "the oldest of the others is gone"


@pytest.mark.realtime  # no moment comes in which all wait, so that a virtual clock would stand still
async def test_nodes_link_while_one_address_connects_without_end(crowd: Crowd, patient: Node) -> None:
    a = Node("a")
    async with linked_nodes(patient) as nursery:
        for _ in range(4):
            nursery.start_soon(crowd.connect_without_end, patient)
        await until(lambda: patient.links.statistics().unauthenticated == QUICK.handshakes_max)
        a.knows(patient)
        await nursery.start(a.run)
        await all_linked(a, patient)
