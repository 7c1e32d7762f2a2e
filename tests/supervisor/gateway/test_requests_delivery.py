"""Slow readers get their whole response, and a response that was cut is logged and counted as cut."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from protocol.dialects.responses import FINAL_EVENTS
from supervisor.cluster.directory import Directory
from supervisor.gateway.websocket.frames import text_frame
from supervisor.node import node
from supervisor.processes.process import GracePeriods
from tests.rig.gateway import Client, Rig, at_rest, chat, create, gateway_client, gateway_rig, head, leave_all, post
from tests.rig.log_records import log_records

SMALL: dict[str, Any] = {"send_buffer_bytes": 4096, "close_s": 2.0, "stall_s": 30.0}
LONG = 700  # tokens: about 150 kB of events, which a reader of 4 kB a second is 40 s with

Lines = Callable[[], list[Any]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines of the access log so far, of requests to models."""
    caplog.set_level(logging.INFO)
    return lambda: [
        record
        for record in log_records(caplog)
        if record.name == "espalier.requests" and hasattr(record, "response_bytes")
    ]


class Slow(trio.abc.ReceiveStream):
    """Reads at most 4 kB a second."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream, self.read_bytes = stream, 0

    async def send_all(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive_some(self, _: int | None = None) -> bytes | bytearray:
        await trio.sleep(1)
        data = await self.stream.receive_some(4096)
        self.read_bytes += len(data)
        return data

    async def aclose(self) -> None:
        await self.stream.aclose()


async def backlogged(rig: Rig) -> None:
    """Wait until some client has a backlog."""
    while not any(connection.backlog_bytes for connection in rig.gateway.connections):  # noqa: ASYNC110  # there is no event for it
        await trio.sleep(0.01)


async def asked(rig: Rig, request: bytes) -> Client:
    """Connect a client that reads slowly, send a request, and return once its response waits in a backlog."""
    client = Client(Slow(await rig.connect(receive_buffer=2304)))
    await client.send(request)
    await backlogged(rig)
    return client


def streamed(**headers: str) -> bytes:
    return post(chat(f"n={LONG}", stream=True, max_completion_tokens=LONG), **headers)


async def test_a_slow_reader_gets_its_whole_response_before_its_connection_closes(
    lines: Lines, rather_slow: MockClock
) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = await asked(rig, streamed(connection="close"))
        reply = await client.reply()
        assert reply.whole
        assert reply.events[-1] == "[DONE]"
        assert await client.closed()
        assert trio.current_time() > 10 * SMALL["close_s"]
        await at_rest(rig)
        (line,) = lines()
        assert (line.outcome, line.response_bytes) == ("length", client.stream.read_bytes)


async def test_a_slow_reader_of_http_1_0_gets_its_whole_response(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = await asked(rig, streamed().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert not await client.closed()
        head, _, body = client.buffer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert all(event.startswith(b"data: ") for event in body.split(b"\n\n")[:-1])
        assert body.endswith(b"data: [DONE]\n\n")
        await at_rest(rig)
        assert lines()[0].response_bytes == client.stream.read_bytes == len(client.buffer)


async def test_a_request_is_logged_when_its_last_byte_has_been_sent(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = await asked(rig, streamed())
        assert lines() == []
        assert (await client.reply()).whole
        await trio.sleep(0.1)
        (line,) = lines()
        assert (line.outcome, line.response_bytes) == ("length", client.stream.read_bytes)
        assert line.duration_s < 5, "that is the time of the answer, not of its reader"


async def test_a_response_on_a_websocket_counts_the_bytes_of_all_its_events(lines: Lines) -> None:
    async with gateway_client() as (rig, client):
        await client.upgrade()
        await client.say(create("n=9"))
        read_bytes = 0
        while True:
            _, payload = await client.frame()
            read_bytes += len(text_frame(payload))
            if json.loads(payload)["type"] in FINAL_EVENTS:
                break
        await leave_all(rig)
        assert [line.response_bytes for line in lines()] == [read_bytes]


def drain(rig: Rig, drain_s: float, nursery: trio.Nursery) -> None:
    """Drain a node with this gateway; when the nursery has nothing else to do, its end is that of the drain."""
    unused: Any = None
    assembly: Any = SimpleNamespace(directory=Directory("main"), gateway=rig.gateway, links=None)
    runtime: Any = SimpleNamespace(grace=GracePeriods())
    rig.gateway.draining = rig.gateway.gate.draining = False
    node.Node(unused, assembly, runtime, unused, lambda: drain_s, nursery=nursery).drain("a test")


async def test_a_drain_waits_for_slow_readers(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = await asked(rig, streamed())
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            drain(rig, 60.0, nursery)
            reply = await client.reply()
        assert (reply.whole, reply.events[-1]) == (True, "[DONE]")
        assert 10 < trio.current_time() - began_at < 59
        await at_rest(rig)
        assert [(line.outcome, line.response_bytes) for line in lines()] == [("length", client.stream.read_bytes)]


HALF = {
    "head": b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n",
    "body": head("POST", "/v1/chat/completions", content_length=100) + b"{",
    "nothing but the question": head("POST", "/v1/chat/completions", content_length=100, expect="100-continue"),
}


@pytest.mark.parametrize("part", HALF)
async def test_o_half_a_request_is_refused_at_the_end_of_a_drain(part: str, rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        await client.send(HALF[part])
        if "100-continue" in HALF[part].decode():
            assert (await client.reply()).status == 100
        await trio.sleep(0.1)
        async with trio.open_nursery() as nursery:
            drain(rig, 60.0, nursery)
            reply = await client.reply()
            assert (reply.status, reply.error["code"]) == (503, "draining")
            assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
            assert await client.closed()
        await at_rest(rig)


async def test_a_drain_waits_for_slow_readers_of_websockets(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = Client(Slow(await rig.connect(receive_buffer=2304)))
        assert (await client.upgrade()).status == 101
        await client.say(create(f"n={LONG}", max_output_tokens=LONG))
        await backlogged(rig)
        async with trio.open_nursery() as nursery:
            drain(rig, 90.0, nursery)
            assert (await client.events())[-1]["type"] == "response.incomplete"
            assert await client.close_code() == 1012
        await at_rest(rig)
        (line,) = lines()
        assert line.outcome == "length"
        assert line.response_bytes <= client.stream.read_bytes


async def test_a_response_that_a_drain_cuts_is_logged_and_counted_as_cut(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = await asked(rig, streamed().replace(b"HTTP/1.1", b"HTTP/1.0"))
        async with trio.open_nursery() as nursery:
            drain(rig, 5.0, nursery)
        assert 5 <= trio.current_time() < 9
        metrics, connections = rig.metrics, tuple(rig.gateway.connections)
        assert connections
    (line,) = lines()
    assert (line.outcome, line.cut) == ("cut", "drain")
    assert 0 < line.response_bytes < 100_000
    assert b'espalier_responses_incomplete_total{api="chat",reason="drain"} 1.0' in metrics.render({})
    assert b'outcome="length"' not in metrics.render({})
    del client


async def test_a_cut_response_of_http_1_0_ends_with_a_reset(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL | {"stall_s": 3.0}) as rig:
        stream = await rig.connect(receive_buffer=2304)
        await stream.send_all(streamed().replace(b"HTTP/1.1", b"HTTP/1.0"))
        await at_rest(rig)
        (line,) = lines()
        assert (line.outcome, line.cut) == ("cut", "stalled")
        assert b'espalier_clients_dropped_total{reason="stalled"} 1.0' in rig.metrics.render({})
        with pytest.raises(trio.BrokenResourceError):
            while await stream.receive_some(65536):
                pass


async def test_a_dropped_client_is_logged_as_slow_and_not_as_left(lines: Lines, rather_slow: MockClock) -> None:
    """Its response was not complete when the server closed the connection, and that is logged and counted."""
    async with gateway_rig(**SMALL | {"stall_s": 1.0}) as rig:
        stream = await rig.connect(receive_buffer=2304)
        await stream.send_all(post(chat(f"n={LONG} s=0.05", stream=True, max_completion_tokens=LONG)))
        with trio.fail_after(30):
            while not rig.gateway.connections:  # noqa: ASYNC110  # there is no event for it
                await trio.sleep(0.01)
        await rig.gateway.connections.wait_closed()
        await at_rest(rig)
        (line,) = lines()
        assert line.outcome == "slow_client"
        text = rig.metrics.render({})
        assert b'outcome="slow_client"' in text
        assert b"espalier_requests_cancelled_total{" not in text


async def test_a_client_that_leaves_with_a_backlog_is_logged_as_left(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_rig(**SMALL) as rig:
        client = await asked(rig, streamed())
        await trio.aclose_forcefully(client.stream.stream)
        await at_rest(rig)
        assert [(line.outcome, line.cut) for line in lines()] == [("cut", "left")]


async def test_a_refused_request_has_one_line_with_the_bytes_of_its_error(lines: Lines, rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        reply = await client.ask(post(chat("n=3", n=100, max_completion_tokens=5)))
        assert reply.status == 400
        await leave_all(rig)
        (line,) = lines()
        assert (line.outcome, line.response_bytes > len(reply.body)) == ("invalid_request", True)
