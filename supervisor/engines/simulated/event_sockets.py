"""The sockets at which anybody hears of a simulated engine's prefix cache, by ZMQ and in SGLang's own form.

A PUB socket sends each batch to those who have subscribed, and drops what a slow one does not take. A ROUTER socket
answers with the batches from a number on, and then with an empty one whose number is -1. ZMQ moves bytes in a thread of
its own; here nothing blocks, and a socket is waited for by its descriptor. Only a node that has such a socket loads
this file: `pyzmq` may be absent elsewhere.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio
import zmq

from protocol.errors import StartFailed
from supervisor.engines.simulated.event_batches import NUMBER_BYTES, TOPIC, EventBatches
from supervisor.links.endpoint import Endpoint

log = logging.getLogger(__name__)

CLOSE_S = 1.0
QUEUE_MAX = 100_000  # messages that ZMQ keeps for one subscriber
TURN_BATCHES = 64  # of a replay, that are sent in one turn
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # the number behind a replay


async def publish(
    batches: EventBatches,
    listen: Endpoint,
    replay: Endpoint | None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Publish the batches of one engine until cancelled; raises `StartFailed` for an address that cannot be had."""
    async with _sockets() as bound:
        publisher = await bound(zmq.PUB, listen)
        router = None if replay is None else await bound(zmq.ROUTER, replay)
        async with trio.open_nursery() as nursery:
            if router is not None:
                nursery.start_soon(_answer, router, batches)
            task_status.started()
            while True:
                number, payload = await batches.next()
                publisher.send_multipart((TOPIC, number, payload), zmq.NOBLOCK)


@asynccontextmanager
async def _sockets() -> AsyncIterator[Callable[[int, Endpoint], Awaitable[zmq.Socket[bytes]]]]:
    """Return what makes sockets that listen; close them afterwards, and log if their thread does not end."""
    context, opened = zmq.Context(), list[zmq.Socket[bytes]]()
    try:
        yield partial(_bound, context, opened)
    finally:
        for each in opened:
            each.close(linger=0)
        with trio.move_on_after(CLOSE_S, shield=True) as closing:
            await trio.to_thread.run_sync(context.term, abandon_on_cancel=True)
        if closing.cancelled_caught:
            log.warning("the sockets for events of an engine were not closed within %s s", CLOSE_S)


async def _bound(
    context: zmq.Context[zmq.Socket[bytes]], opened: list[zmq.Socket[bytes]], kind: int, endpoint: Endpoint
) -> zmq.Socket[bytes]:
    """Return a socket that listens, which is among those that are `opened`."""
    bound = context.socket(kind)
    opened.append(bound)
    try:
        bound.set_hwm(QUEUE_MAX)
        bound.setsockopt(zmq.IPV6, 1)
        found = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        host, port, *_ = found[0][4]
        bound.bind(f"tcp://{Endpoint(str(host), int(port))}")
    except (zmq.ZMQError, OSError) as error:
        raise StartFailed(f"events cannot be published at {endpoint}: {error}") from error
    return bound


async def _answer(router: zmq.Socket[bytes], batches: EventBatches) -> None:
    """Answer those who have missed batches, one after the other."""
    descriptor = router.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    while True:
        # The descriptor is readable when something has changed, and no longer once the events have been looked at.
        while _receivable(router):
            await _replay(router, router.recv_multipart(zmq.NOBLOCK), batches)
        await trio.lowlevel.wait_readable(descriptor)


def _receivable(router: zmq.Socket[bytes]) -> bool:
    events = router.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


async def _replay(router: zmq.Socket[bytes], frames: list[bytes], batches: EventBatches) -> None:
    await trio.lowlevel.checkpoint()
    if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:  # not a question
        return
    asker, empty, number = frames
    for count, (each, payload) in enumerate(batches.since(int.from_bytes(number, "big"))):
        if count and count % TURN_BATCHES == 0:
            await trio.lowlevel.checkpoint()
        router.send_multipart((asker, empty, TOPIC, each, payload), zmq.NOBLOCK)
    router.send_multipart((asker, empty, b"", END, b""), zmq.NOBLOCK)
