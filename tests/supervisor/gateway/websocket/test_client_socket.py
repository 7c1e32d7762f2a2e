"""The socket of a WebSocket client: messages, pongs and close frames, however the client cuts its bytes."""

from __future__ import annotations

import tracemalloc
from typing import cast

import pytest
import trio
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock
from wsproto.connection import Connection, ConnectionType
from wsproto.events import Event, Pong

from supervisor.gateway.outbox import Outbox
from supervisor.gateway.websocket.client_socket import ClientSocket
from supervisor.gateway.websocket.replayed_stream import ReplayedStream
from tests.rig.gateway import frame

CONTINUED = 0x00
PING, CLOSE = 0x89, 0x88


@define(eq=False)
class Cut:
    """A client's bytes in pieces, and what is written to it."""

    pieces: list[bytes]
    written: bytearray = field(factory=bytearray)
    pongs: list[bytes] = field(factory=list)
    close_sent: bool = False
    ended: bool = False

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        assert not self.pieces or len(self.pieces[0]) <= max_bytes
        return self.pieces.pop(0) if self.pieces else b""

    def end(self) -> None:
        self.ended = True

    def put(self, data: bytes) -> None:
        self.written += data

    put_last = put

    def socket(self, message_max: int = 10_000) -> ClientSocket:
        outbox, stream = cast("Outbox", self), cast("ReplayedStream", self)
        return ClientSocket(outbox, stream, message_max, active_at=0, on_pong=self.pongs.append)

    def events(self) -> list[Event]:
        """Return what the client gets, as another implementation reads it."""
        client = Connection(ConnectionType.CLIENT)
        client.receive_data(bytes(self.written))
        return list(client.events())


def received(cut: Cut, socket: ClientSocket) -> list[str | bytes]:
    """Return all messages up to the client's end."""
    messages: list[str | bytes] = []

    async def read() -> None:
        with pytest.raises(trio.BrokenResourceError):
            while True:
                messages.append(await socket.receive())

    trio.run(read)
    return messages


def fragments(data: bytes, cuts: list[int], first: int) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts})
    parts = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
    final = len(parts) - 1
    return [
        frame(part, (first if number == 0 else CONTINUED) | (0x80 if number == final else 0))
        for number, part in enumerate(parts)
    ]


MESSAGES = st.lists(st.tuples(st.one_of(st.text(max_size=40), st.binary(max_size=40)), st.lists(st.integers(0, 50))))


@given(MESSAGES, st.lists(st.integers(1, 60), max_size=30), st.booleans())
def test_messages_are_whole_however_they_are_cut(
    messages: list[tuple[str | bytes, list[int]]], sizes: list[int], pings: bool
) -> None:
    data, sent_pings = b"", list[bytes]()
    for message, cuts in messages:
        raw = message.encode() if isinstance(message, str) else message
        for part in fragments(raw, cuts, 0x01 if isinstance(message, str) else 0x02):
            data += part
            if pings:
                sent_pings.append(b"%d" % len(sent_pings))
                data += frame(sent_pings[-1], PING)
    pieces = list[bytes]()
    for size in sizes:
        pieces, data = [*pieces, data[:size]] if data else pieces, data[size:]
    cut = Cut([*pieces, *(data[at : at + 10_000] for at in range(0, len(data), 10_000))])
    assert received(cut, cut.socket()) == [message for message, _ in messages]
    assert [event.payload for event in cut.events() if isinstance(event, Pong)] == sent_pings


@pytest.mark.parametrize("part", [b"", b"ab", "ä".encode()])
@pytest.mark.parametrize("first", [0x01, 0x02])
def test_the_parts_of_a_message_take_little_more_memory_than_their_bytes(first: int, part: bytes) -> None:
    count = 5_000
    data = frame(b"", first) + frame(part, CONTINUED) * count
    cut = Cut([data[at : at + 10_000] for at in range(0, len(data), 10_000)])
    socket = cut.socket(1_000_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert received(cut, socket) == []
        assert tracemalloc.get_traced_memory()[0] - before < 2 * count * len(part) + 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x0f\xa0bye"])
def test_a_close_frame_is_answered_once_and_nothing_is_read_behind_it(payload: bytes) -> None:
    cut = Cut([frame(b"one") + frame(payload, CLOSE) + frame(b"two") + frame(b"", CLOSE)])
    assert received(cut, cut.socket()) == ["one"]
    assert bytes(cut.written) == bytes([CLOSE, len(payload)]) + payload
    assert cut.ended


@pytest.mark.parametrize("behind", [frame(b"", PING), frame(b"", CLOSE), b"\xff" * 9])
def test_nothing_is_sent_behind_a_close_frame(behind: bytes) -> None:
    cut = Cut([behind])
    socket = cut.socket()
    socket.close(1001, "going")
    socket.close(1000, "again")
    assert received(cut, socket) == []
    assert bytes(cut.written) == b"\x88\x07\x03\xe9going"


async def test_other_tasks_run_between_messages_that_came_together(rather_slow: MockClock) -> None:
    cut = Cut([frame(b"x") * 20])
    socket, turns = cut.socket(), 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for _ in range(20):
            await socket.receive()
        assert turns > 10
        nursery.cancel_scope.cancel()
