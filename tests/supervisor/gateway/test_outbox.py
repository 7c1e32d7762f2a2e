"""The outbox of a client: everything is sent whole and in order, and a slow client is dropped."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.errors import SlowClient
from supervisor.config.certificate import Certificate
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.websocket.frames import close_frame, text_frame
from tests.rig import certificate


def ends() -> list[Any]:
    """Return both ends of a connection with a small send buffer: the server's and the client's."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return [trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in (near, far)]


@asynccontextmanager
async def pair(backlog: int = 1 << 20, stall_s: float = 30.0) -> AsyncIterator[tuple[Outbox, Any]]:
    """An outbox that is being drained, and the client's end of its socket."""
    server, client = ends()
    box = Outbox(server, backlog, stall_s)
    async with client, trio.open_nursery() as nursery:
        nursery.start_soon(box.run)
        await trio.testing.wait_all_tasks_blocked()
        yield box, client
        await box.aclose()
        nursery.cancel_scope.cancel()


async def read_all(client: trio.abc.Stream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := await client.receive_some(65536)):
        data += piece
    return bytes(data)


async def fill(box: Outbox, size: int = 1000) -> list[bytes]:
    """Put frames until some wait."""
    frames: list[bytes] = []
    while not box.backlog_bytes:
        frames.append(bytes([len(frames) % 251]) * size)
        box.put(frames[-1])
    return frames


async def carried(box: Outbox, client: trio.abc.Stream, frames: list[bytes], rng: random.Random) -> bytes:
    """Put all frames, with turns of other tasks between them, and return what the client has read at the end."""
    got = bytearray()

    async def read() -> None:
        while len(got) < sum(map(len, frames)):
            got.extend(await client.receive_some(rng.randint(1, 9000)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for each in frames:
            box.put(each)
            assert box.backlog_bytes == box.statistics().backlog_bytes
            if rng.random() < 0.5:
                await trio.lowlevel.checkpoint()
        await box.wait_flushed()
        assert box.backlog_bytes == 0
    return bytes(got)


async def test_a_writable_socket_is_written_in_the_same_turn() -> None:
    async with pair() as (box, client):
        box.put(b"now")
        assert box.backlog_bytes == 0
        assert os.read(client.socket.fileno(), 10) == b"now"


def reluctant(rng: random.Random) -> tuple[Callable[[Any, bytes], int], Callable[[Any, Any], int]]:
    """Return `write` and `writev` of a socket that takes a little, or nothing."""
    write, writev = os.write, os.writev

    def some(fd: int, data: bytes) -> int:
        if rng.random() < 0.2:
            raise BlockingIOError
        return write(fd, data[: rng.randint(1, 2000)])

    def some_of_many(fd: int, parts: list[bytes]) -> int:
        return some(fd, b"".join(parts)) if rng.random() < 0.9 else writev(fd, parts[:1])

    return some, some_of_many


@pytest.mark.parametrize("seed", range(15))
async def test_frames_go_out_whole_and_in_order_however_little_the_socket_takes(
    seed: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    some, some_of_many = reluctant(rng)
    monkeypatch.setattr(os, "write", some)
    monkeypatch.setattr(os, "writev", some_of_many)
    frames = [
        struct.pack(">I", size) + rng.randbytes(size) for size in (rng.choice((0, 1, 90, 5000)) for _ in range(80))
    ]
    async with pair() as (box, client):
        assert await carried(box, client, frames, rng) == b"".join(frames)


async def test_without_a_backlog_a_frame_of_any_size_is_accepted_whole() -> None:
    async with pair(backlog=1000) as (box, client):
        box.put(bytes(300_000))
        with pytest.raises(SlowClient):
            box.put(b"more")
        assert await read_all(client, 300_000) == bytes(300_000)
        await box.wait_flushed()
        box.put(b"more")
        assert await client.receive_some(10) == b"more"


async def test_last_bytes_follow_the_frame_that_was_begun_and_replace_the_others() -> None:
    async with pair(backlog=1 << 20) as (box, client):
        frames = await fill(box)
        begun = b"".join(frames)
        for _ in range(20):
            box.put(b"never sent" * 100)
        box.put_last(b"the end")
        assert box.backlog_bytes < 2000
        assert await read_all(client, len(begun) + 7) == begun + b"the end"
        await box.wait_flushed()


async def test_last_bytes_for_a_client_that_is_gone_do_not_count_as_sent() -> None:
    server, client = ends()
    box = Outbox(server, 1 << 20, 30.0)
    await client.aclose()
    with pytest.raises(trio.BrokenResourceError):
        box.put_last(b"the end")
    assert (box.accepted_bytes, box.sent_bytes, box.lost_bytes) == (0, 0, 0)
    await box.aclose()


async def test_a_long_frame_that_is_read_slowly_is_copied_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    size, writev, held = 1 << 20, os.writev, set[int]()

    def some(fd: int, parts: list[bytes | memoryview]) -> int:
        part = memoryview(parts[0])
        held.add(memoryview(part.obj).nbytes)
        return writev(fd, [part[:4096]])

    monkeypatch.setattr(os, "writev", some)
    data = random.Random(7).randbytes(size)
    async with pair() as (box, client):
        box.put(data)
        assert await read_all(client, size) == data
        await box.wait_flushed()
    assert 5 < len(held) < 30, "by each copy the frame is half as long"


async def test_a_client_that_reads_nothing_for_stall_s_is_slow(autojump_clock: MockClock) -> None:
    async with pair(stall_s=7.0) as (box, _):
        watched = Outbox(box.stream, box.backlog_bytes_max, 7.0)
        await fill(watched)
        with pytest.raises(SlowClient, match=r"nothing for 7\.0 s"):
            await watched.run()
        assert trio.current_time() == 7
        with pytest.raises(trio.BrokenResourceError):
            watched.put(b"x")


async def test_a_client_that_reads_now_and_then_is_not_slow(autojump_clock: MockClock) -> None:
    async with pair(stall_s=7.0) as (box, client):
        frames = await fill(box)
        for _ in range(30):
            frames.append(bytes(1000))
            box.put(frames[-1])
        got = b""
        while len(got) < 1000 * len(frames):
            await trio.sleep(6)
            got += await read_all(client, min(10_000, 1000 * len(frames) - len(got)))
        assert got == b"".join(frames)
        assert trio.current_time() >= 12


async def test_a_client_that_is_gone_breaks_the_stream_and_ends_all_waits() -> None:
    async with pair() as (box, client):
        await fill(box)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(box.wait_flushed)
            await trio.testing.wait_all_tasks_blocked()
            await client.aclose()
        assert box.client_gone
        assert box.backlog_bytes == 0
        for put in (box.put, box.put):
            with pytest.raises(trio.BrokenResourceError):
                put(b"x")
        box.put_last(b"x")


async def test_closing_ends_all_waits_and_the_draining_task() -> None:
    server, client = ends()
    async with client:
        box = Outbox(server, 1 << 20, 30.0)
        async with trio.open_nursery() as nursery:
            await fill(box, 100_000)
            nursery.start_soon(box.run)
            nursery.start_soon(box.wait_flushed)
            await trio.testing.wait_all_tasks_blocked()
            await box.aclose()
        with pytest.raises(trio.BrokenResourceError):
            box.put(b"x")


@asynccontextmanager
async def hearing_out(box: Outbox, client: trio.abc.Stream) -> AsyncIterator[None]:
    """Let an outbox linger on a client that has read its last bytes; wait for the end of that on leaving."""
    box.put(b"no")
    await box.wait_flushed()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.linger)
        await client.send_all(b"but I had more to say" * 100)
        assert await client.receive_some(10) == b"no"
        yield


async def test_lingering_lasts_until_the_client_closes() -> None:
    async with pair() as (box, client), hearing_out(box, client):
        assert await client.receive_some(10) == b""
        await client.send_eof()


@given(st.binary(max_size=70_000) | st.sampled_from([bytes(n) for n in (0, 125, 126, 65_535, 65_536)]))
def test_text_frames_can_be_read_by_another_implementation(payload: bytes) -> None:
    from wsproto.frame_protocol import FrameProtocol, Opcode

    reader = FrameProtocol(client=True, extensions=[])
    reader.receive_bytes(text_frame(payload.hex().encode()))
    frames = list(reader.received_frames())
    assert {frame.opcode for frame in frames} <= {Opcode.TEXT, Opcode.CONTINUATION}
    assert "".join(str(frame.payload) for frame in frames) == payload.hex()
    assert frames[-1].message_finished


def test_a_close_frame_has_its_code_and_a_reason_of_at_most_123_bytes() -> None:
    from wsproto.frame_protocol import FrameProtocol

    reader = FrameProtocol(client=True, extensions=[])
    reader.receive_bytes(close_frame(1013, "é" * 100))
    (frame,) = reader.received_frames()
    reason = frame.payload[1]
    assert isinstance(reason, str)
    assert frame.payload[0] == 1013
    assert len(reason.encode()) <= 123


# TLS: the outbox's own task sends ------------------------------------------------------------------


@asynccontextmanager
async def secure_pair(
    backlog: int = 1 << 20, stall_s: float = 30.0, *, run: bool = True
) -> AsyncIterator[tuple[Outbox, trio.SSLStream[Any]]]:
    near, far = ends()
    context = Certificate(*certificate.files()).context()
    server = trio.SSLStream(near, context, server_side=True, https_compatible=True)
    client = trio.SSLStream(far, certificate.trusting(), server_hostname="localhost", https_compatible=True)
    box = Outbox(server, backlog, stall_s)
    with near.socket, far.socket:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.do_handshake)
            await client.do_handshake()
        async with trio.open_nursery() as nursery:
            if run:
                nursery.start_soon(box.run)
            yield box, client
            nursery.cancel_scope.cancel()


async def test_over_tls_frames_go_out_whole_and_in_order() -> None:
    rng = random.Random(5)
    frames = [struct.pack(">I", size) + rng.randbytes(size) for size in (1, 90, 40_000, 5000, 0, 300) * 10]
    async with secure_pair() as (box, client):
        assert await carried(box, client, frames, rng) == b"".join(frames)


async def test_over_tls_a_full_backlog_refuses_and_keeps_what_it_has() -> None:
    async with secure_pair(backlog=10_000) as (box, client):
        put = 0
        with pytest.raises(SlowClient, match="bytes wait for the client to read"):
            while True:
                box.put(bytes([put % 251]) * 1000)
                put += 1
                await trio.testing.wait_all_tasks_blocked()
        assert box.drop_reason == "backlog"
        assert box.backlog_bytes <= 10_000
        assert await read_all(client, 1000 * put) == b"".join(bytes([n % 251]) * 1000 for n in range(put))


async def test_over_tls_last_bytes_follow_the_frames_that_were_begun_and_replace_the_others() -> None:
    async with secure_pair() as (box, client):
        frames = [bytes([number]) * 1000 for number in range(60)]
        for frame in frames:
            box.put(frame)
        await trio.testing.wait_all_tasks_blocked()
        before = box.statistics()
        begun = len(frames) - before.backlog_frames + before.begun_frames
        assert before.begun_frames > 1
        box.put_last(b"the end")
        assert await read_all(client, 1000 * begun + 7) == b"".join(frames[:begun]) + b"the end"
        await box.wait_flushed()


async def test_over_tls_frames_of_an_earlier_write_do_not_count_as_begun() -> None:
    async with secure_pair() as (box, client):
        for frame in (b"one", b"two", b"three"):
            box.put(frame)
        assert await read_all(client, 11) == b"onetwothree"
        await box.wait_flushed()
        for frame in (b"four", b"five", b"six"):
            box.put(frame)
        box.put_last(b"the end")
        assert await read_all(client, 11) == b"fourthe end"


async def test_over_tls_nothing_is_sent_twice_when_the_client_is_gone() -> None:
    async with secure_pair() as (box, client):
        box.put(bytes(100_000))
        await trio.testing.wait_all_tasks_blocked()
        box.client_gone = True
        assert await read_all(client, 100_000) == bytes(100_000)
        await trio.testing.wait_all_tasks_blocked()
        assert box.backlog_bytes == 0
        with trio.move_on_after(0.05):
            pytest.fail(f"{await client.receive_some(10)!r} came again")


async def test_over_tls_closing_ends_all_waits_and_the_sending_task() -> None:
    async with secure_pair(run=False) as (box, _):
        async with trio.open_nursery() as nursery:
            box.put(bytes(1_000_000))
            nursery.start_soon(box.wait_flushed)
            nursery.start_soon(box.run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.1):  # its TLS close would wait for what is being sent
                await box.aclose()
            await trio.aclose_forcefully(box)
        assert box.backlog_bytes == 0


async def test_over_tls_a_client_that_reads_nothing_for_stall_s_is_slow(autojump_clock: MockClock) -> None:
    async with secure_pair(stall_s=7.0, run=False) as (box, _):
        box.put(bytes(1_000_000))
        before = trio.current_time()
        with pytest.raises(SlowClient, match=r"nothing for 7\.0 s"):
            await box.run()
        assert trio.current_time() == before + 7
        assert (box.client_gone, box.drop_reason) == (True, "stalled")
        with pytest.raises(trio.BrokenResourceError):
            box.put(b"x")


async def test_over_tls_a_client_that_is_gone_breaks_the_stream_and_ends_all_waits() -> None:
    async with secure_pair() as (box, client):
        box.put(bytes(1_000_000))
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(client)
        with trio.fail_after(5):
            await box.wait_flushed()
        assert box.client_gone
        with pytest.raises(trio.BrokenResourceError):
            box.put(b"x")


@pytest.mark.parametrize(("more", "fine"), [(-1, True), (0, True), (1, False)])
async def test_a_backlog_holds_exactly_its_limit(more: int, fine: bool) -> None:
    async with pair(backlog=100_000) as (box, _):
        await fill(box)
        before = box.backlog_bytes
        data = bytes(100_000 - before + more)
        if fine:
            box.put(data)
            assert box.backlog_bytes == 100_000 + more
        else:
            with pytest.raises(SlowClient, match=f"{before} bytes wait for the client to read"):
                box.put(data)
            assert (box.backlog_bytes, box.drop_reason) == (before, "backlog")


async def test_over_tls_lingering_shows_the_client_the_end() -> None:
    async with secure_pair() as (box, client), hearing_out(box, client):
        assert await client.receive_some(10) == b""
        await client.aclose()
