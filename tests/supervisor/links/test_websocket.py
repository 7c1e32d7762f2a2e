"""Long messages of a link, which are written without the WebSocket library: it reads them at the other end."""

from __future__ import annotations

import socket
from typing import cast

import pytest
import trio
import trio.testing
import trio_websocket
from wsproto.frame_protocol import FrameProtocol

from protocol.link.peer import MESSAGE_BYTES_MAX
from supervisor.links.endpoint import Endpoint
from supervisor.links.handshake_stream import LimitedStream
from supervisor.links.websocket import LONG_BYTES, ConnectionHandler, WebSocketTransport, accept, dial
from tests.rig.nodes import LOOPBACK

pytestmark = pytest.mark.realtime

SIZES = (1, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1, MESSAGE_BYTES_MAX)
WITHIN_S = 5.0


def message(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


async def send(transport: WebSocketTransport) -> None:
    transport.stream.lift_limit()  # as once the greeting has proved the other end's name
    for size in SIZES:
        await transport.send_all(message(size))


async def receive(transport: WebSocketTransport) -> None:
    transport.stream.lift_limit()
    for size in SIZES:
        assert await transport.receive_some() == message(size)
    assert await transport.receive_some() == b""  # the sender's handler ends, and closes the WebSocket


async def run_ends(dialing: ConnectionHandler, accepting: ConnectionHandler) -> None:
    """Run a handler at each end of a WebSocket until both have ended."""
    listener = (await trio.open_tcp_listeners(0, host=LOOPBACK))[0]
    endpoint = Endpoint(LOOPBACK, listener.socket.getsockname()[1])

    async def accept_one() -> None:
        async with listener:
            await accept(await listener.accept(), None, WITHIN_S, accepting)

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_one)
            nursery.start_soon(dial, endpoint, None, WITHIN_S, dialing)


async def test_messages_of_all_sizes_arrive_whole_from_the_end_that_has_dialed() -> None:
    await run_ends(send, receive)


async def test_messages_of_all_sizes_arrive_whole_from_the_end_that_was_dialed() -> None:
    await run_ends(receive, send)


async def test_a_pong_is_not_written_into_a_long_message() -> None:
    async def send_much(transport: WebSocketTransport) -> None:
        await send(transport)
        for _ in range(16):
            await transport.send_all(message(MESSAGE_BYTES_MAX))

    async def ping_and_receive(transport: WebSocketTransport) -> None:
        transport.stream.lift_limit()
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(transport.socket.ping, b"%d" % number)
            for size in (*SIZES, *[MESSAGE_BYTES_MAX] * 16):
                assert await transport.receive_some() == message(size)

    await run_ends(send_much, ping_and_receive)


async def test_a_long_message_to_an_end_that_has_closed_breaks_the_transport() -> None:
    async def close(transport: WebSocketTransport) -> None:
        await transport.socket.aclose()

    async def send_late(transport: WebSocketTransport) -> None:
        assert await transport.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError, match="the WebSocket is closed"):
            await transport.send_all(message(LONG_BYTES))

    await run_ends(send_late, close)


@pytest.mark.parametrize("is_client", [True, False])
async def test_a_long_message_has_the_head_of_the_standard(is_client: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    monkeypatch.setattr("wsproto.frame_protocol.os.urandom", bytes)
    expected = FrameProtocol(client=is_client, extensions=[]).send_data(message(LONG_BYTES))

    class Library:
        closed = None

        def __init__(self) -> None:
            self.is_client = is_client

    async with trio.SocketStream(trio.socket.from_stdlib_socket(near)) as stream:
        with far:
            library = cast("trio_websocket.WebSocketConnection", Library())
            received = bytearray()

            async def read() -> None:
                other = trio.socket.from_stdlib_socket(far)
                while len(received) < len(expected):
                    received.extend(await other.recv(2**16))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await WebSocketTransport(library, LimitedStream(stream)).send_all(message(LONG_BYTES))
            assert received == expected
