"""The slow server knows what is fetched from it, and when that ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from bench.rig.node import wait_until
from bench.rig.slow_server import PICTURE_BYTES, SlowServer

WITHIN_S = 10.0

pytestmark = pytest.mark.realtime


@pytest.fixture
def server() -> Iterator[SlowServer]:
    running = SlowServer()
    yield running
    running.close()


@pytest.mark.parametrize("path", ["silent", "trickle"])
def test_a_fetch_lasts_until_its_client_leaves(server: SlowServer, path: str) -> None:
    assert server.url(path) == f"http://127.0.0.1:{server.port}/{path}"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        assert wait_until(lambda: server.connections == 1, WITHIN_S) is not None
        assert server.asked == 0
        client.sendall(f"GET /{path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        assert wait_until(lambda: server.asked == 1, WITHIN_S) is not None
        client.settimeout(0.3 if path == "silent" else WITHIN_S)
        if path == "silent":
            with pytest.raises(TimeoutError):
                client.recv(1)
        else:
            assert str(PICTURE_BYTES).encode() in client.recv(4096)
    assert wait_until(lambda: server.connections == server.asked == 0, WITHIN_S) is not None
