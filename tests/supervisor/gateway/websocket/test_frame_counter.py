"""Data in very many very small pieces: it is read, and other clients wait only for a little of it."""

from __future__ import annotations

from random import Random
from typing import Any

import h11
import pytest
import trio
from h11 import Connection
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock
from wsproto.connection import Connection as WebSocketParser

from supervisor.gateway.http.plain_head import RequestHead
from supervisor.gateway.http.syntax import Event, HttpSyntax
from supervisor.gateway.websocket.frame_counter import FrameCounter
from tests.rig.gateway import create, frame, gateway_client, gateway_rig, head
from tests.rig.sockets import websocket_client, whole

CLIENTS = 12
A_TURN = 64  # pieces of the one client whose turn it is
FREE = 4  # pieces of each client that are read without waiting
EMPTY = frame(b"", 0x00)  # goes on with a message, and adds nothing


class Pass(trio.abc.Instrument):
    """Counts in each pass of the event loop, and keeps the largest count."""

    def __init__(self) -> None:
        self.count = self.most = self.all = 0

    def add(self, count: int) -> None:
        self.count += count
        self.all += count
        self.most = max(self.most, self.count)

    def after_io_wait(self, timeout: float) -> None:
        self.count = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """The number of small pieces that the libraries have read, and the most of them in one pass."""
    counted = Pass()
    receive_data, next_event = WebSocketParser.receive_data, h11.Connection.next_event

    def frames(self: WebSocketParser, data: bytes) -> None:
        counted.add((data or b"").count(EMPTY))
        receive_data(self, data)

    def chunks(self: Connection) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        event = next_event(self)
        counted.add(isinstance(event, h11.Data))
        return event

    monkeypatch.setattr(WebSocketParser, "receive_data", frames)
    monkeypatch.setattr(h11.Connection, "next_event", chunks)
    return counted


async def test_empty_frames_of_many_clients_are_read_one_client_at_a_time(rather_slow: MockClock, seen: Pass) -> None:
    async with gateway_rig() as rig:
        clients = [await websocket_client(rig) for _ in range(CLIENTS)]
        trio.lowlevel.add_instrument(seen)
        for each in clients:
            await each.send(frame(b"", 0x01) + EMPTY * 600)
        with trio.fail_after(30):
            while seen.all < 600 * CLIENTS:  # noqa: ASYNC110  # the library has no event for it
                await trio.sleep(0.01)
        assert seen.most <= A_TURN
        for each in clients:  # and the message is whole
            await each.send(frame(b'{"type": "response.cancel"}', 0x80))
            assert await whole(each, create("n=2"))


async def test_bodies_of_single_bytes_are_read_one_client_at_a_time(rather_slow: MockClock, seen: Pass) -> None:
    async with gateway_rig() as rig:
        clients = [await rig.client() for _ in range(CLIENTS)]
        trio.lowlevel.add_instrument(seen)
        for each in clients:
            await each.send(head("POST", "/v1/chat/completions", transfer_encoding="chunked") + b"1\r\n \r\n" * 600)
        with trio.fail_after(30):
            while seen.all < 600 * CLIENTS:  # noqa: ASYNC110  # as above
                await trio.sleep(0.01)
        assert seen.most <= A_TURN + CLIENTS * FREE
        for each in clients:
            body = b'{"model": "tiny", "messages": [{"role": "user", "content": "n=2"}]}'
            await each.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert (await each.reply()).status == 200


async def test_the_rest_of_a_refused_body_is_not_read_in_one_turn(rather_slow: MockClock, seen: Pass) -> None:
    async with gateway_client() as (_, client):
        trio.lowlevel.add_instrument(seen)
        await client.send(head("POST", "/nothing", transfer_encoding="chunked") + b"1\r\n \r\n" * 600)
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (404, "close")
        assert seen.most <= A_TURN


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """The number of requests that have been read, and the most of them in one pass."""
    counted = Pass()
    next_event = HttpSyntax.next_event

    def requests(self: HttpSyntax) -> Event:
        event = next_event(self)
        counted.add(isinstance(event, RequestHead))
        return event

    monkeypatch.setattr(HttpSyntax, "next_event", requests)
    return counted


AHEAD = 200  # requests in one piece


async def test_pipelined_requests_of_many_clients_are_read_one_client_at_a_time(
    rather_slow: MockClock, heads: Pass
) -> None:
    async with gateway_rig() as rig:
        clients = [await rig.client() for _ in range(CLIENTS)]
        trio.lowlevel.add_instrument(heads)
        for each in clients:
            await each.send(head(path="/nothing") * AHEAD)
        for each in clients:
            for _ in range(AHEAD):
                assert (await each.reply()).status == 404
        assert heads.all == AHEAD * CLIENTS
        assert heads.most <= 1 + CLIENTS  # one of the client whose turn it is, and the first of each client


async def test_a_client_with_few_pipelined_requests_does_not_wait_for_one_with_many(
    rather_slow: MockClock, heads: Pass
) -> None:
    async with gateway_rig() as rig:
        many, few = await rig.client(), await rig.client()
        await rig.gateway.turns.reading.acquire()  # as if a client sent very many pieces
        await many.send(head(path="/nothing") * AHEAD)
        await few.send(head() * FREE)
        for _ in range(FREE):
            assert (await few.reply()).status == 200
        assert heads.all <= 2 * FREE + 1
        rig.gateway.turns.reading.release()
        for _ in range(AHEAD):
            assert (await many.reply()).status == 404


async def test_a_client_with_few_frames_does_not_wait_for_one_with_many(rather_slow: MockClock, seen: Pass) -> None:
    async with gateway_rig() as rig:
        many, few = await websocket_client(rig), await websocket_client(rig)
        await rig.gateway.turns.reading.acquire()  # as if a client sent very many pieces
        await many.send(frame(b"", 0x01) + EMPTY * 600)
        assert (await whole(few, create("n=2")))["status"] == "completed"
        assert seen.all <= FREE
        rig.gateway.turns.reading.release()
        await many.send(frame(b'{"type": "response.cancel"}', 0x80))
        assert (await whole(many, create("n=2")))["status"] == "completed"


SIZES = st.one_of(st.integers(0, 300), st.sampled_from([125, 126, 65_535, 65_536]))


@given(st.lists(SIZES, max_size=20), st.lists(st.integers(1, 400), max_size=60), st.integers(1, 5))
def test_frames_are_counted_in_pieces_of_any_size(sizes: list[Any], cuts: list[Any], most: int) -> None:
    data = b"".join(frame(bytes(size), 0x00) for size in sizes)
    heads, counted, read = FrameCounter(), 0, 0
    ends = [sum(cuts[:each]) for each in range(1, len(cuts) + 1)] + [len(data)]
    for end in ends:
        while read < min(end, len(data)):
            size, frames = heads.feed(data[read:end], most)
            assert frames <= most
            assert size > 0
            counted, read = counted + frames, read + size
    assert (counted, read) == (len(sizes), len(data))


MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=4), max_size=8)


@given(MESSAGES, st.lists(st.integers(1, 400), max_size=60), st.integers(1, 5), st.randoms(use_true_random=False))
def test_messages_are_counted_until_they_are_taken_in_pieces_of_any_size(
    messages: list[list[int]], cuts: list[Any], most: int, rng: Random
) -> None:
    data, whole = b"", []
    for parts in messages:
        for number, size in enumerate(parts):
            last = number == len(parts) - 1
            data += frame(bytes(size), 0x80 * last | (not number)) + frame(b"still there", 0x89)
        whole.append((len(data), sum(parts)))  # behind a ping, which is of no message
    heads, read, taken = FrameCounter(), 0, 0
    for cut in [*cuts, len(data)]:
        end = min(read + cut, len(data))
        while read < end:
            read += heads.feed(data[read:end], most)[0]
            while taken < len(whole) and whole[taken][0] <= read and rng.random() < 0.5:
                assert heads.message_taken() == whole[taken][1]
                taken += 1
        assert heads.kept_bytes >= sum(size for at, size in whole[taken:] if at <= read)
    assert heads.kept_bytes == sum(size for _, size in whole[taken:])
    assert [heads.message_taken() for _ in whole[taken:]] == [size for _, size in whole[taken:]]
    assert heads.kept_bytes == 0
