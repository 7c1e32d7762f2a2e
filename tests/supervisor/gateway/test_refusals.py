"""Clients that are refused read the answer, however they send; their sockets are kept for a while, and are few."""

from __future__ import annotations

import socket
from array import array
from collections.abc import AsyncIterator
from fcntl import ioctl

import pytest
import trio
from trio.testing import MockClock

from supervisor.gateway import refusals as refusals_module
from supervisor.gateway.refusals import KEPT_S, LOOK_S, READS_MAX, SPARE_DESCRIPTORS, Refusals

SIOCOUTQ = 0x5411  # of Linux: how many bytes that were sent are not read


@pytest.fixture
async def refusals(autojump_clock: MockClock) -> AsyncIterator[Refusals]:
    made = Refusals()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()
    assert len(made) == 0


def refused(refusals: Refusals) -> socket.socket:
    """Return the client's end of a connection that was refused and closed."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    refusals.refuse(theirs.fileno())
    theirs.close()
    ours.settimeout(5)
    return ours


async def test_a_client_that_still_sends_reads_the_whole_answer(refusals: Refusals, autojump_clock: MockClock) -> None:
    client = refused(refusals)
    for _ in range(3):
        client.send(b"x" * 20_000)
        await trio.sleep(2 * LOOK_S)
    answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer
    assert client.recv(1) == b""
    assert len(refusals) == 1
    client.close()
    await trio.sleep(2 * LOOK_S)
    assert len(refusals) == 0


async def test_a_client_that_does_not_end_is_left_after_a_while(refusals: Refusals, autojump_clock: MockClock) -> None:
    client = refused(refusals)
    await trio.sleep(KEPT_S - 2 * LOOK_S)
    assert len(refusals) == 1
    await trio.sleep(4 * LOOK_S)
    assert len(refusals) == 0
    client.close()


async def test_of_many_the_oldest_are_left(
    refusals: Refusals, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(refusals_module, "KEPT_MAX", 3)
    clients = [refused(refusals) for _ in range(5)]
    assert len(refusals) == 3
    for client in clients:
        assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
        client.close()


async def test_they_leave_file_descriptors_for_others(refusals: Refusals, autojump_clock: MockClock) -> None:
    refusals.descriptors_max = 1_000_000
    clients = [refused(refusals) for _ in range(3)]
    assert len(refusals) == 3
    refusals.descriptors_max = SPARE_DESCRIPTORS
    clients.append(refused(refusals))
    assert len(refusals) == 0
    for client in clients:
        assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
        client.close()


async def test_so_much_is_read_in_one_look(refusals: Refusals, autojump_clock: MockClock) -> None:
    clients = [refused(refusals) for _ in range(3 * READS_MAX)]
    for client in clients:
        client.settimeout(0)
        client.send(b"x" * 1000)
    await trio.sleep(1.5 * LOOK_S)
    assert sum(map(sendable, clients)) == READS_MAX
    await trio.sleep(2 * LOOK_S)
    assert sum(map(sendable, clients)) == 3 * READS_MAX
    for client in clients:
        client.close()


def sendable(client: socket.socket) -> bool:
    """Whether all that a client has sent is read."""
    unread = array("i", [0])
    ioctl(client, SIOCOUTQ, unread)
    return unread[0] == 0


async def test_a_client_that_has_gone_costs_nothing(refusals: Refusals, autojump_clock: MockClock) -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    refusals.refuse(theirs.fileno())
    refusals.refuse(10**6)  # no descriptor is left
    theirs.close()
    await trio.sleep(2 * LOOK_S)
    assert len(refusals) == 0
