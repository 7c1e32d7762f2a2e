"""Publisher: the blocks and the load of one engine, as streams for any number of nodes.

It follows the engine once and answers all its watchers, so that an engine's process does the same work for any number
of gateways. It stands beside the engine and not in its way: no request waits for it, or fails with it. When the engine
is lost its blocks are forgotten at once, before another life of it can be chosen.

Watchers get a change at once, and further ones within `every_s` together, in as many replies as it takes; a slow
watcher gets fewer and larger ones.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeAlias

import trio
from attrs import define, field

from actors.engines.blocks.block_log import BlockLog, BlockReader
from actors.engines.blocks.following import changes_of
from actors.engines.port import Engine
from actors.kit.calls import Answer, BugCounter, Call, Inbox
from protocol.errors import EngineLost, Overloaded, RequestError, Unsupported
from protocol.messages.engine import Done, EngineLoad, WatchLoad
from protocol.messages.kv_events import BlockEvents, WatchBlocks

log = logging.getLogger(__name__)

WATCHERS_MAX = 512
EVERY_S = 0.01
LOST_S = 0.05  # the time until a lost engine is withdrawn
RETRY_S = 1.0  # the pause after a failed watch; twice as long each time in a row
RETRY_MAX_S = 60.0

Watch: TypeAlias = WatchBlocks | WatchLoad
WatchReply: TypeAlias = BlockEvents | EngineLoad


class EngineSource(Protocol):
    """The published engine, in one life after the other."""

    async def wait(self) -> Engine:
        """Wait until the engine is up, and return it."""


@define(eq=False)
class Published:
    """The blocks of one engine, and its latest load, as far as they were reported."""

    blocks: BlockLog
    loads: EngineLoad | None = None
    load_changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def set_loads(self, loads: EngineLoad | None) -> None:
        """Replace the load, None while the engine is down."""
        self.loads = loads
        self.load_changed.unpark_all()


async def publisher(
    inbox: Inbox[Call[Watch, WatchReply, Done]],
    source: EngineSource,
    published: Published,
    every_s: float = EVERY_S,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Follow the lives of an engine, and answer its watchers, at most `WATCHERS_MAX` at a time."""
    bugs, watchers = BugCounter(), trio.CapacityLimiter(WATCHERS_MAX)
    # An earlier life of this actor may have missed events.
    published.blocks.clear()

    async def answer_one(call: Call[Watch, WatchReply, Done]) -> None:
        with call.answering(bugs) as answer:
            try:
                watchers.acquire_on_behalf_of_nowait(call)
            except trio.WouldBlock:
                raise Overloaded(f"{WATCHERS_MAX} watch this engine already") from None
            try:
                await _send(call.request, published, answer, every_s)
                answer.end(Done())
            finally:
                watchers.release_on_behalf_of(call)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_follow, source, published)
        task_status.started()
        while True:
            nursery.start_soon(answer_one, await inbox.receive())


async def _follow(source: EngineSource, published: Published) -> None:
    """Follow one life of the engine after the other."""
    while True:
        engine = await source.wait()
        try:
            async with trio.open_nursery() as nursery:
                watch_load = partial(engine.watch_load, published.set_loads)
                nursery.start_soon(_watch, watch_load, partial(published.set_loads, None), "load")
                watch_blocks = partial(engine.watch_blocks, published.blocks.merge)
                nursery.start_soon(_watch, watch_blocks, published.blocks.clear, "blocks")
                await engine.wait_lost()
                nursery.cancel_scope.cancel(reason="the engine is lost")
        finally:
            published.blocks.clear()
            published.set_loads(None)
        await trio.sleep(LOST_S)


async def _watch(watch: Callable[[], Awaitable[None]], drop: Callable[[], None], subject: str) -> None:
    """Watch an engine until it is lost; after an error, drop its reports and ask again.

    It asks later each time, until it could watch for `RETRY_MAX_S`.
    """
    await trio.lowlevel.checkpoint()
    pause_s = RETRY_S
    while True:
        began = trio.current_time()
        try:
            await watch()
        except (EngineLost, Unsupported):
            break
        except RequestError as error:
            log.warning("an engine does not report its %s: %s", subject, error)
        drop()
        if trio.current_time() - began >= RETRY_MAX_S:
            pause_s = RETRY_S
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_MAX_S)


async def _send(request: Watch, published: Published, answer: Answer[WatchReply, Done], every_s: float) -> None:
    if isinstance(request, WatchBlocks):
        await _send_blocks(BlockReader(published.blocks, request.life, request.since), answer, every_s)
    else:
        await _send_loads(published, answer, every_s)


async def _send_blocks(reader: BlockReader, answer: Answer[WatchReply, Done], every_s: float) -> None:
    """Send missed and new changes to a watcher, until its credit is used up.

    A change is sent at once, and further ones within `every_s` together.
    """
    await trio.lowlevel.checkpoint()
    with changes_of(reader.log) as changed:
        while answer.credit > 0:
            if (events := reader.read(answer.credit)) is not None:
                answer.put(events)
                await trio.sleep(every_s if reader.is_caught_up else 0)
            else:
                await changed.park()


async def _send_loads(published: Published, answer: Answer[WatchReply, Done], every_s: float) -> None:
    """Send the latest load when it has changed, until the watcher's credit is used up."""
    await trio.lowlevel.checkpoint()
    sent: EngineLoad | None = None
    while answer.credit > 0:
        if published.loads is not None and published.loads != sent:
            sent = published.loads
            answer.put(sent)
            await trio.sleep(every_s)
        else:
            await published.load_changed.park()
