"""The sockets for the events of simulated engines: ordinary ZMQ subscribers hear of them, and what they missed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import zmq
from attrs import evolve

from actors.engines.port import Engine
from actors.engines.sglang.host.kv_events import translated
from actors.engines.simulated.cache_events import CacheChange
from actors.engines.simulated.engine import SimulatedEngine
from bench.rig.node import free_ports
from protocol.block_hashes import block_hashes
from protocol.errors import StartFailed
from protocol.kv_events import BlockChange, BlockEvent
from supervisor.engines.kinds import read_cluster
from supervisor.engines.simulated import event_sockets
from supervisor.engines.simulated.event_batches import EventBatches
from supervisor.engines.simulated.event_sockets import CLOSE_S, END, FRAME_BYTES_MAX, publish
from supervisor.links.endpoint import Endpoint
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import render
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, engine
from tests.rig.simulated_engines import generate

pytestmark = pytest.mark.realtime

SUBSCRIBED_S = 0.3  # ZMQ subscribes in the background
RECEIVE_MS = 5000


def change(number: int) -> list[CacheChange]:
    return [CacheChange(BlockEvent(BlockChange.STORED, 0, (number,)), (number, number))]


@asynccontextmanager
async def published(*, replay: bool = True) -> AsyncIterator[tuple[EventBatches, Endpoint, Endpoint]]:
    listen, again = (Endpoint("127.0.0.1", port) for port in free_ports(2))
    batches = EventBatches(2, lambda: 1.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(publish, batches, listen, again if replay else None)
        yield batches, listen, again
        nursery.cancel_scope.cancel()


@contextmanager
def connected(kind: int, endpoint: Endpoint, queue_max: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    own = context.socket(kind)
    own.set_hwm(queue_max)
    own.setsockopt(zmq.RCVTIMEO, RECEIVE_MS)
    if kind == zmq.SUB:
        own.setsockopt(zmq.SUBSCRIBE, b"kv-events")
    own.connect(f"tcp://{endpoint}")
    try:
        yield own
    finally:
        context.destroy(linger=0)


async def received(own: zmq.Socket[bytes]) -> tuple[int, list[int]]:
    """Return the number of the next batch, and the blocks in it."""
    *_, number, payload = await trio.to_thread.run_sync(own.recv_multipart)
    if number == END:
        return -1, []
    return int.from_bytes(number, "big"), [block for event in translated(payload, 0) for block in event.hashes]


async def test_a_subscriber_hears_of_every_batch() -> None:
    async with published() as (batches, listen, _):
        with connected(zmq.SUB, listen) as subscriber:
            await trio.sleep(SUBSCRIBED_S)
            for number in range(500):
                batches.put(change(number))
            assert [await received(subscriber) for _ in range(500)] == [(number, [number]) for number in range(500)]


async def test_what_was_missed_is_replayed() -> None:
    async with published() as (batches, _, again):
        for number in range(300):
            batches.put(change(number))
        with connected(zmq.DEALER, again) as asker:
            for first in (0, 298, 300, 2**63):
                await trio.to_thread.run_sync(asker.send_multipart, [b"", first.to_bytes(8, "big")])
                missed = [(number, [number]) for number in range(first, 300)]
                assert [await received(asker) for _ in range(len(missed) + 1)] == [*missed, (-1, [])]


async def test_a_question_that_is_none_is_not_answered_and_the_next_one_is() -> None:
    async with published() as (batches, _, again):
        batches.put(change(1))
        with connected(zmq.DEALER, again) as asker:
            for wrong in ([b"what"], [b"", b"?"], [b"", b"", b"", b""]):
                await trio.to_thread.run_sync(asker.send_multipart, wrong)
            await trio.to_thread.run_sync(asker.send_multipart, [b"", bytes(8)])
            assert [await received(asker) for _ in range(2)] == [(0, [1]), (-1, [])]


async def test_an_asker_that_takes_nothing_holds_up_no_other_and_its_answer_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_sockets, "ANSWER_S", 1.0)
    kept = 1000
    async with published() as (batches, _, again):
        for number in range(kept):
            batches.put([CacheChange(BlockEvent(BlockChange.STORED, 0, (number,)), (2**31,) * 3000)])
        with connected(zmq.DEALER, again, queue_max=1) as slow, connected(zmq.DEALER, again) as asker:
            await trio.to_thread.run_sync(slow.send_multipart, [b"", bytes(8)])
            await trio.sleep(SUBSCRIBED_S)
            for _ in range(3):  # whatever was sent meanwhile
                await trio.to_thread.run_sync(asker.send_multipart, [b"", bytes(8)])
                assert [(await received(asker))[0] for _ in range(kept + 1)] == [*range(kept), -1]
            await trio.sleep(1.0)
            slow.setsockopt(zmq.RCVTIMEO, 500)
            taken = list[int]()
            with pytest.raises(zmq.Again):
                while True:
                    taken.append((await received(slow))[0])
            assert taken == list(range(len(taken)))
            assert len(taken) < kept, "what is not taken is not kept for it by ZMQ, and the buffers of TCP are less"
            await trio.to_thread.run_sync(slow.send_multipart, [b"", (kept - 1).to_bytes(8, "big")])
            assert [(await received(slow))[0] for _ in range(2)] == [kept - 1, -1]


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
async def test_a_frame_that_is_too_long_ends_its_connection_and_no_other(kind: int) -> None:
    async with published() as (batches, listen, again):
        batches.put(change(1))
        with connected(kind, listen if kind == zmq.SUB else again) as own, connected(zmq.DEALER, again) as asker:
            monitor = own.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await trio.sleep(SUBSCRIBED_S)
            assert not monitor.poll(0)
            if kind == zmq.SUB:
                own.setsockopt(zmq.SUBSCRIBE, bytes(10 * FRAME_BYTES_MAX))
            else:
                own.send_multipart([b"", bytes(10 * FRAME_BYTES_MAX)])
            assert await trio.to_thread.run_sync(monitor.poll, RECEIVE_MS)
            await trio.to_thread.run_sync(asker.send_multipart, [b"", bytes(8)])
            assert [await received(asker) for _ in range(2)] == [(0, [1]), (-1, [])]


async def test_a_subscriber_that_never_reads_delays_nobody() -> None:
    async with published(replay=False) as (batches, listen, _):
        with connected(zmq.SUB, listen), connected(zmq.SUB, listen) as subscriber:
            await trio.sleep(SUBSCRIBED_S)
            for number in range(2000):
                batches.put(change(number))
                if number % 100 == 0:
                    await trio.lowlevel.checkpoint()
            assert [await received(subscriber) for _ in range(2000)][-1] == (1999, [1999])


async def test_the_sockets_are_closed_soon_and_their_threads_have_ended() -> None:
    before = threading.active_count()
    async with published() as (batches, listen, again):
        with connected(zmq.SUB, listen), connected(zmq.DEALER, again):
            await trio.sleep(SUBSCRIBED_S)
            batches.put(change(1))
            ends_at = trio.current_time()
    assert trio.current_time() - ends_at < CLOSE_S
    for endpoint in (listen, again):
        with pytest.raises(OSError, match=r"[Rr]efused|failed"):
            await trio.open_tcp_stream(endpoint.host, endpoint.port)
    assert threading.active_count() <= before + 2  # of Trio's pool


async def test_a_stall_while_they_are_closed_ends_no_thread_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_in = list[threading.Thread]()
    end = zmq.Context.term

    def term(context: zmq.Context[zmq.Socket[bytes]]) -> None:
        ended_in.append(threading.current_thread())
        end(context)

    async def stall() -> None:
        await trio.sleep(event_sockets.SETTLED_S / 4)
        time.sleep(2 * CLOSE_S)  # noqa: ASYNC251  # as a loop that is busy

    monkeypatch.setattr(zmq.Context, "term", term)
    monkeypatch.setattr(event_sockets, "CLOSE_S", CLOSE_S / 4)
    async with trio.open_nursery() as nursery, published():
        nursery.start_soon(stall)
    assert len(ended_in) == 1
    assert ended_in[0] is not threading.main_thread(), "it may never return"


async def test_an_address_that_is_taken_fails_the_start() -> None:
    async with published() as (_, listen, _):
        with pytest.raises(StartFailed, match="cannot be published at"):
            await publish(EventBatches(2, lambda: 1.0), listen, None)


@asynccontextmanager
async def node(written: Callable[[str], Path], listen: int, replay: int) -> AsyncIterator[Assembly]:
    """Run the engine of a node and the sockets for its events."""
    events = f'events = {{ listen = "127.0.0.1:{listen}", replay = "127.0.0.1:{replay}" }}\n'
    assembly, _ = built_assembly(read_cluster(written(f"[gateway]\nport = 0\n{MODEL}{engine('one')}{events}")), "main")
    assert f"by ZMQ, for anybody, at 127.0.0.1:{listen}" in render(assembly.tree)
    members = [child for child in assembly.tree.children if child.name in {"one", "event-sockets"}]
    tree = evolve(assembly.tree, children=tuple(evolve(child, needs=()) for child in members))
    run = partial(supervise, tree, on_event=assembly.on_event, rng=random.Random(0))
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: run(task_status=task_status))
        yield assembly
        nursery.cancel_scope.cancel()


async def hear(subscriber: zmq.Socket[bytes], simulated: Engine) -> None:
    """Ask an engine, until all blocks of a prompt have been heard of."""
    request = generate(f"{trio.current_time()}", 40, 1)
    await simulated.submit(request).result()
    wanted, heard = set(block_hashes(request.tokens, simulated.info.page_size)), set[int]()
    while not wanted <= heard:
        heard.update((await received(subscriber))[1])


async def test_an_engine_of_a_node_publishes_what_it_caches_in_each_of_its_lives(
    written: Callable[[str], Path],
) -> None:
    listen, again = free_ports(2)
    async with node(written, listen, again) as assembly:
        with connected(zmq.SUB, Endpoint("127.0.0.1", listen)) as subscriber:
            await trio.sleep(SUBSCRIBED_S)
            simulated = await assembly.engines["one"].wait()
            await hear(subscriber, simulated)
            assert isinstance(simulated, SimulatedEngine)
            simulated.crash()
            _, _, payload = await trio.to_thread.run_sync(subscriber.recv_multipart)
            assert [event.change for event in translated(payload, 0)] == [BlockChange.CLEARED]
            await hear(subscriber, await assembly.engines["one"].wait())


async def test_an_address_that_is_taken_costs_no_engine_and_is_tried_again(written: Callable[[str], Path]) -> None:
    listen, again = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", listen))
        taken.listen()
        async with node(written, listen, again) as assembly:
            simulated = await assembly.engines["one"].wait()
            assert await simulated.submit(generate("a", 40, 1)).result() is not None
            taken.close()
            with connected(zmq.SUB, Endpoint("127.0.0.1", listen)) as subscriber:
                await trio.sleep(2.0)  # until it is tried again, and the subscriber, too
                await hear(subscriber, simulated)
            assert assembly.engines["one"].current is simulated
