"""The acknowledgements of the other kernel, as a real one reports them."""

from __future__ import annotations

import ssl
import struct

import pytest
import trio
import trio.testing

from supervisor.links.handshake_stream import TCP_INFO, LimitedStream
from tests.rig.nodes import LOOPBACK, until

pytestmark = pytest.mark.realtime


async def connected(nursery: trio.Nursery) -> tuple[trio.SocketStream, trio.SocketStream]:
    listener = (await trio.open_tcp_listeners(0, host=LOOPBACK))[0]
    near = await trio.open_tcp_stream(LOOPBACK, listener.socket.getsockname()[1])
    far = await listener.accept()
    await listener.aclose()
    return near, far


async def test_a_kernel_acknowledges_for_a_process_that_reads_nothing(nursery: trio.Nursery) -> None:
    near, far = await connected(nursery)
    async with near, far:
        line = LimitedStream(near)
        assert line.acknowledged_s() == 0.0
        await near.send_all(bytes(1000))
        await trio.sleep(0.3)  # it was acknowledged a while ago, and nothing is due
        assert line.acknowledged_s() == 0.0
        with trio.move_on_after(0.5):
            while True:  # until both ends' buffers are full, and the window is closed
                await near.send_all(bytes(1 << 20))
        full_at = trio.current_time()
        # Not only what has filled them, but what is sent from time to time since then.
        await until(lambda: (line.acknowledged_s() or 0.0) < (trio.current_time() - full_at) / 2)


async def test_a_kernel_that_owes_an_acknowledgement_counts_by_its_last_one(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = await connected(nursery)
    async with near, far:
        for probes, unacknowledged, is_s in ((0, 1, 2.5), (1, 0, 2.5), (0, 0, 0.0)):
            info = bytearray(TCP_INFO.size)
            info[3] = probes
            struct.pack_into("=I", info, 24, unacknowledged)
            struct.pack_into("=I", info, 56, 2500)
            monkeypatch.setattr(type(near.socket), "getsockopt", lambda *_, info=bytes(info): info)
            assert LimitedStream(near).acknowledged_s() == is_s
        monkeypatch.setattr(type(near.socket), "getsockopt", lambda *_: b"less")
        assert LimitedStream(near).acknowledged_s() is None


async def test_acknowledgements_are_known_below_tls_and_not_without_a_socket(nursery: trio.Nursery) -> None:
    near, far = await connected(nursery)
    async with near, far:
        line = LimitedStream(trio.SSLStream(near, ssl.create_default_context(), server_hostname="x"))
        assert line.acknowledged_s() == 0.0
    assert LimitedStream(trio.testing.memory_stream_pair()[0]).acknowledged_s() is None
