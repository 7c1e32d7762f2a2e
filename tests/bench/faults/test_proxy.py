"""The proxy before a node cuts, holds, slows down and refuses connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest

from bench.faults.proxy import FaultProxy, ProxiedConnection

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]

WITHIN_S = 30.0


@pytest.fixture
def stack() -> Iterator[ExitStack[bool | None]]:
    with ExitStack() as exit_stack:
        yield exit_stack


def joined(stack: ExitStack[bool | None]) -> tuple[FaultProxy, socket.socket, socket.socket]:
    """Return the proxy, and both ends of a connection through it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    cutter = FaultProxy(listener.getsockname()[1])
    stack.callback(cutter.close)
    near = stack.enter_context(socket.create_connection(("127.0.0.1", cutter.port), WITHIN_S))
    far = stack.enter_context(listener.accept()[0])
    far.settimeout(WITHIN_S)
    near.sendall(b"hello")
    assert far.recv(10) == b"hello"
    return cutter, near, far


def chosen(cutter: FaultProxy) -> ProxiedConnection:
    connection = cutter.choose(Random(1))
    assert connection is not None
    return connection


def ends(end: socket.socket) -> bool:
    """Wait for the end of a connection, by a close or a reset."""
    end.settimeout(WITHIN_S)
    try:
        return end.recv(10) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_ends_at_both_ends(reset: bool, stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    chosen(cutter).cut(reset=reset)
    assert ends(near)
    assert ends(far)


def test_a_held_connection_delivers_nothing_until_it_is_healed(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    connection = chosen(cutter)
    connection.hold(connection.directions)
    near.sendall(b"late")
    far.settimeout(0.1)
    with pytest.raises(TimeoutError):
        far.recv(10)
    cutter.heal()
    far.settimeout(WITHIN_S)
    assert far.recv(10) == b"late"


def test_a_slow_connection_passes_everything(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    chosen(cutter).pause_s = 0.01
    sent, received = bytes(range(256)) * 8, b""
    near.sendall(sent)
    while len(received) < len(sent):
        received += far.recv(len(sent))
    assert received == sent


def test_refused_connections_are_closed(stack: ExitStack[bool | None]) -> None:
    cutter, near, _ = joined(stack)
    cutter.refuse(300.0)
    assert ends(near)
    assert ends(stack.enter_context(socket.create_connection(("127.0.0.1", cutter.port), WITHIN_S)))
