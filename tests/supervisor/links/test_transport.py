"""A stream socket as the transport of a link: what is sent arrives, and each kind of end shows as what it is."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from supervisor.links.transport import SocketTransport


@asynccontextmanager
async def transport() -> AsyncIterator[tuple[SocketTransport, socket.socket]]:
    """One end as a transport, and the other."""
    near, far = socket.socketpair()
    with far:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(near)) as stream:
            yield SocketTransport(stream), far


async def test_what_has_come_and_what_comes_later_is_received_up_to_the_end() -> None:
    async with transport() as (near, far), trio.open_nursery() as nursery:
        far.send(b"early")
        assert await near.receive_some() == b"early"
        received: list[bytes | bytearray] = []

        async def receive() -> None:
            received.append(await near.receive_some())

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        assert received == []
        far.send(b"late")
        await wait_all_tasks_blocked()
        assert received == [b"late"]
        far.close()
        assert await near.receive_some() == b""


async def test_a_reset_is_a_broken_transport() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    async with trio.SocketStream(trio.socket.from_stdlib_socket(near)) as stream:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(trio.BrokenResourceError, match="the socket broke"):
            await SocketTransport(stream).receive_some()


async def test_a_transport_that_was_closed_here_says_so() -> None:
    async with transport() as (near, _):
        await near.stream.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await near.receive_some()
