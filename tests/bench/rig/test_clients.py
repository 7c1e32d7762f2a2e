"""The ways in which a client leaves, as a server sees them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from bench.rig.clients import Chat, chat_body


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


def connected(listener: socket.socket) -> tuple[Chat, socket.socket]:
    """Return a client that has sent its request, and the server's end of its connection, which has read it."""
    chat = Chat(listener.getsockname()[1], chat_body("x"))
    served, _ = listener.accept()
    served.settimeout(10)
    received = b""
    while not received.endswith(b"}"):
        received += served.recv(4096)
    return chat, served


def test_a_close_is_the_end_of_the_connection(listener: socket.socket) -> None:
    chat, served = connected(listener)
    with served:
        chat.close()
        assert served.recv(1) == b""


def test_a_reset_is_seen_as_one(listener: socket.socket) -> None:
    chat, served = connected(listener)
    with served:
        chat.reset()
        with pytest.raises(ConnectionResetError):
            served.recv(1)


def test_a_half_close_ends_one_direction(listener: socket.socket) -> None:
    chat, served = connected(listener)
    with served:
        chat.half_close()
        assert served.recv(1) == b""
        served.sendall(b'HTTP/1.1 503 No\r\ncontent-length: 15\r\n\r\n{"error": {}}\n\n')
        assert chat.read().status == 503


@pytest.mark.parametrize("read", [Chat.read, Chat.read_body])
def test_an_error_is_read_where_a_server_does_not_put_it_below_error(
    listener: socket.socket, read: Callable[[Chat], object]
) -> None:
    chat, served = connected(listener)
    with served:
        served.sendall(b'HTTP/1.1 400 No\r\ncontent-length: 18\r\n\r\n{"message": "bad"}')
        read(chat)
        assert chat.outcome.error == {"message": "bad"}
