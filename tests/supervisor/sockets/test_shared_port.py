"""Several listeners at one port: the kernel divides connections, and one that leaves loses none that waited."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from supervisor.sockets.bound_sockets import bound_sockets
from supervisor.sockets.descriptor_reserve import DescriptorReserve
from supervisor.sockets.shared_port import EmptiedListener

CONNECTIONS = 60


async def opened(port: int) -> trio.SocketListener:
    (bound,) = await bound_sockets(port, "127.0.0.1", shared=True)
    bound.listen(128)
    return trio.SocketListener(bound)


def port_of(listener: trio.SocketListener) -> int:
    port: int = listener.socket.getsockname()[1]
    return port


async def connected(port: int, number: int) -> list[trio.SocketStream]:
    return [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(number)]


async def accepted(listener: trio.abc.Listener[trio.SocketStream]) -> list[trio.SocketStream]:
    """Return the connections that wait at a listener."""
    streams = list[trio.SocketStream]()
    while True:
        with trio.move_on_after(0.1) as waiting:
            streams.append(await listener.accept())
        if waiting.cancelled_caught:
            return streams


async def close(*resources: trio.abc.AsyncResource) -> None:
    for each in resources:
        await trio.aclose_forcefully(each)


async def test_connections_that_wait_at_a_listener_are_taken_when_it_is_closed() -> None:
    first, taken = await opened(0), list[trio.SocketStream]()
    second = await opened(port_of(first))
    clients = await connected(port_of(first), CONNECTIONS)
    await EmptiedListener(first, first.socket, taken.append).aclose()
    rest = await accepted(second)
    assert 0 < len(taken) == CONNECTIONS - len(rest)
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.send_all, b"x")
        for stream in (*taken, *rest):
            assert await stream.receive_some(1) == b"x"
    later = await connected(port_of(second), CONNECTIONS)
    streams = await accepted(second)
    assert len(streams) == CONNECTIONS
    await close(second, *clients, *taken, *rest, *later, *streams)


async def test_connections_that_wait_are_refused_if_no_descriptor_is_left_for_them() -> None:
    first, taken, refusals, reserve = await opened(0), list[trio.SocketStream](), list[bool](), DescriptorReserve()
    clients = await connected(port_of(first), 20)
    for client in clients:
        await client.send_all(b"GET / HTTP/1.1")
    assert reserve.fill()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, hard))
    try:
        held = _fill_gaps(4)
        await EmptiedListener(first, first.socket, taken.append, reserve, lambda: refusals.append(True), b"no").aclose()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in held:
        os.close(fd)
    assert len(taken) + len(refusals) == len(clients)
    assert 0 < len(taken) < len(clients)
    answered = 0
    for client in clients:
        with trio.move_on_after(0.05):
            answered += await client.receive_some(2) == b"no"
    assert answered == len(refusals)
    reserve.empty()
    await close(*clients, *taken)


def _fill_gaps(left: int) -> list[int]:
    """Use up all descriptors that this process may have, but some."""
    held = list[int]()
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(held.pop())
    return held


async def test_a_port_that_another_has_for_itself_is_refused_and_leaves_nothing_open() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            await opened(other.getsockname()[1])
