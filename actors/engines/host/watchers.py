"""The streams of a host that have many replies: its blocks, and its scheduler's load.

Replies leave between engine steps, in small pieces, because tokens pass through the same loop and the same link. A
stream ends when its credit is used up, and the node asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from attrs import define, field

from actors.engines.blocks.block_log import BlockLog, BlockReader
from actors.engines.host.served_link import ServedLink, last_line
from protocol.errors import AskerLeft, EngineRefused
from protocol.link import codec
from protocol.link.frames import Item, Open
from protocol.messages.engine import Done, EngineLoad, RankLoad, WatchLoad
from protocol.messages.kind import Message
from protocol.messages.kv_events import WatchBlocks

TOGETHER_S = 0.005  # the time after a change of blocks in which further ones are sent with it
LOAD_EVERY_S = 0.1
IDLE_LOAD_EVERY_S = 1.0  # the period while no step shows a change


@define(eq=False)
class Watchers:
    """The streams that the node has opened, by number."""

    link: ServedLink
    log: BlockLog
    get_loads: Callable[[], Awaitable[Sequence[RankLoad]]]
    _tasks: dict[int, asyncio.Task[None]] = field(factory=dict)
    _stepped: asyncio.Event = field(factory=asyncio.Event)

    def on_step(self) -> None:
        """Note that the load may have changed."""
        self._stepped.set()

    def open(self, frame: Open, request: WatchBlocks | WatchLoad) -> None:
        """Begin to answer a stream."""
        sending = self._blocks(frame, request) if isinstance(request, WatchBlocks) else self._loads(frame)
        task = asyncio.get_running_loop().create_task(self._answer(frame.stream, sending))
        self._tasks[frame.stream] = task
        task.add_done_callback(lambda _: self._tasks.pop(frame.stream, None))

    def cancel(self, stream: int) -> None:
        """End a stream whose asker has left; no effect on any other."""
        if (task := self._tasks.get(stream)) is not None:
            task.cancel()

    async def _answer(self, stream: int, sending: Awaitable[None]) -> None:
        try:
            await sending
        except asyncio.CancelledError:
            self.link.messages.fail(stream, AskerLeft("the asker left"))
        except Exception as error:  # noqa: BLE001  # a failed read of the load: no request depends on it
            why = f"the engine cannot be watched: {last_line(error)}"
            self.link.messages.fail(stream, EngineRefused(why))
        else:
            self.link.messages.end(stream, Done())
        self.link.flush()

    async def _blocks(self, frame: Open, request: WatchBlocks) -> None:
        reader, changed, left = BlockReader(self.log, request.life, request.since), asyncio.Event(), frame.credit
        self.log.listeners.add(changed.set)
        try:
            while left > 0:
                if (events := reader.read(left)) is not None:
                    self._send(frame.stream, events)
                    left -= 1
                    await asyncio.sleep(TOGETHER_S if reader.is_caught_up else 0)
                else:
                    changed.clear()
                    await changed.wait()
        finally:
            self.log.listeners.discard(changed.set)

    async def _loads(self, frame: Open) -> None:
        sent, left = EngineLoad.of_ranks(()), frame.credit
        while left > 0:
            loads = EngineLoad.of_ranks(await self.get_loads())
            if loads != sent:
                sent = loads
                self._send(frame.stream, loads)
                left -= 1
            self._stepped.clear()
            try:
                async with asyncio.timeout(IDLE_LOAD_EVERY_S):
                    await self._stepped.wait()
                await asyncio.sleep(LOAD_EVERY_S)
            except TimeoutError:
                pass

    def _send(self, stream: int, message: Message) -> None:
        self.link.peer.send(Item(stream, codec.encode(message), 1))
        self.link.flush()
