"""The sockets at which anybody hears of a simulated engine's prefix cache, by ZMQ and in SGLang's own form.

A PUB socket sends each batch to those who have subscribed, and drops what a slow one does not take. A ROUTER socket
answers with the batches from a number on, and then with an empty one whose number is -1. ZMQ moves bytes in a thread of
its own; here nothing blocks, and a socket is waited for by its descriptor. Only a node that has such a socket loads
this file: `pyzmq` may be absent elsewhere.

Anybody may ask, so what an asker costs is bounded: its answer is given to ZMQ only as it is taken, and ends unfinished
after a while. ZMQ bounds a frame and the messages of a queue, not the frames of a message nor the number of peers.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf

import trio
import zmq

from protocol.errors import StartFailed
from supervisor.engines.simulated.event_batches import KEPT_MAX, NUMBER_BYTES, TOPIC, EventBatches
from supervisor.links.endpoint import Endpoint

log = logging.getLogger(__name__)

CLOSE_S = 1.0
SETTLED_S = 0.02  # between the last message and the end of the sockets
QUEUE_MAX = KEPT_MAX  # messages that ZMQ keeps for one subscriber; what it misses it may ask for
FRAME_BYTES_MAX = 1024  # of what others send: a subscription, a question, or how they name themselves
ANSWERS_MAX = 64  # at a time, one for each asker; further questions are left out
ANSWER_QUEUE_MAX = 64  # batches of an answer that ZMQ keeps for its asker
ANSWER_S = 10.0  # in which an asker has to take its answer
TAKEN_S = 0.005  # until it is looked again whether an asker has taken some
TURN_BATCHES = 64  # of an answer, that are sent in one turn
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # the number behind a replay


async def publish(
    batches: EventBatches,
    listen: Endpoint,
    replay: Endpoint | None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Publish the batches of one engine until cancelled; raises `StartFailed` for an address that cannot be had."""
    async with _open_context() as context, _sockets(context) as bound:
        publisher = await bound(zmq.PUB, listen, QUEUE_MAX)
        router = None if replay is None else await bound(zmq.ROUTER, replay, ANSWER_QUEUE_MAX)
        async with trio.open_nursery() as nursery:
            if router is not None:
                nursery.start_soon(_answer, router, batches)
            task_status.started()
            while True:
                number, payload = await batches.next()
                publisher.send_multipart((TOPIC, number, payload), zmq.NOBLOCK)


@asynccontextmanager
async def _open_context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    """Return what sockets are made in; wait afterwards until its threads have ended, and log if they do not."""
    context = zmq.Context[zmq.Socket[bytes]]()
    try:
        yield context
    finally:
        with trio.move_on_after(CLOSE_S, shield=True) as closing:
            await trio.to_thread.run_sync(context.term, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
        if closing.cancelled_caught:
            log.warning("the sockets for events of an engine were not closed within %s s", CLOSE_S)


@asynccontextmanager
async def _sockets(
    context: zmq.Context[zmq.Socket[bytes]],
) -> AsyncIterator[Callable[[int, Endpoint, int], Awaitable[zmq.Socket[bytes]]]]:
    """Return what makes sockets that listen; close them afterwards, when their last message has been sent.

    libzmq 4.3.5 never ends a socket that is closed within a millisecond of a message for a subscriber that is just
    leaving (some in a hundred): its threads stay.
    """
    opened = list[zmq.Socket[bytes]]()
    try:
        yield partial(_bound, context, opened)
    finally:
        with trio.move_on_after(SETTLED_S, shield=True):
            await trio.sleep_forever()
        for each in opened:
            each.close(linger=0)


async def _bound(
    context: zmq.Context[zmq.Socket[bytes]],
    opened: list[zmq.Socket[bytes]],
    kind: int,
    endpoint: Endpoint,
    queue_max: int,
) -> zmq.Socket[bytes]:
    """Return a socket that listens, which is among those that are `opened`, with so many messages for each peer."""
    bound = context.socket(kind)
    opened.append(bound)
    try:
        bound.set_hwm(queue_max)
        bound.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        if kind == zmq.ROUTER:
            bound.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what an asker does not take would be dropped
        bound.setsockopt(zmq.IPV6, 1)
        found = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        host, port, *_ = found[0][4]
        bound.bind(f"tcp://{Endpoint(str(host), int(port))}")
    except (zmq.ZMQError, OSError) as error:
        raise StartFailed(f"events cannot be published at {endpoint}: {error}") from error
    return bound


async def _answer(router: zmq.Socket[bytes], batches: EventBatches) -> None:
    """Answer those who have missed batches, beside each other."""
    descriptor, askers = router.getsockopt(zmq.FD), set[bytes]()
    assert isinstance(descriptor, int)
    async with trio.open_nursery() as answers:
        while True:
            # The descriptor is readable when something has changed, and no longer once the events have been looked at,
            # or something was sent: while there are answers, it alone tells too little.
            while _receivable(router):
                asker, *frames = router.recv_multipart(zmq.NOBLOCK)
                if _is_question(frames) and asker not in askers and len(askers) < ANSWERS_MAX:
                    askers.add(asker)
                    answers.start_soon(_replay, router, asker, frames[1], batches, askers)
                await trio.lowlevel.checkpoint()
            with trio.move_on_after(TAKEN_S if askers else inf):
                await trio.lowlevel.wait_readable(descriptor)


def _receivable(router: zmq.Socket[bytes]) -> bool:
    events = router.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _is_question(frames: list[bytes]) -> bool:
    return len(frames) == 2 and len(frames[1]) == NUMBER_BYTES


async def _replay(
    router: zmq.Socket[bytes], asker: bytes, number: bytes, batches: EventBatches, askers: set[bytes]
) -> None:
    """Send one of the askers what it has missed, as far as it takes it in time."""
    try:
        with trio.move_on_after(ANSWER_S):
            for count, (each, payload) in enumerate(batches.since(int.from_bytes(number, "big"))):
                if count % TURN_BATCHES == 0:
                    await trio.lowlevel.checkpoint()
                await _send(router, (asker, b"", TOPIC, each, payload))
            await _send(router, (asker, b"", b"", END, b""))
    except zmq.ZMQError as error:  # it has gone
        log.debug("an asker for events does not get them: %s", error)
    finally:
        askers.discard(asker)


async def _send(router: zmq.Socket[bytes], frames: tuple[bytes, ...]) -> None:
    """Send a message once ZMQ has room for it."""
    while True:
        try:
            router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            await trio.sleep(TAKEN_S)
        else:
            return
