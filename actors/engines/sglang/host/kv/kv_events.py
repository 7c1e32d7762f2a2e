"""The KV events of one rank's scheduler, as SGLang publishes them over ZMQ, brought into a log without gaps.

A subscriber may miss events: the first ones, sent before it has joined, and any that exceed a queue. Each batch has a
number, so a gap is seen at the next batch and filled from the scheduler's replay buffer; the end of a burst is
requested once more, since no later batch may show a gap there. If the buffer lacks the missed events, all blocks of the
rank are dropped from the log.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio
from attrs import define, field, frozen

from actors.engines.blocks.block_log import BlockLog
from protocol.messages.kv_events import GPU, BlockChange, BlockEvent

IDLE_MS = 1000  # the pause after a batch at which its burst is over
REPLAY_S = 10.0
RETRY_S = 1.0  # the pause after a failure; twice as long each time
RETRY_MAX_S = 30.0
END = (-1).to_bytes(8, "big", signed=True)  # the number behind a replay
QUEUE_MAX = 100_000  # batches that wait to be received


@frozen
class EventSource:
    """The sockets of one rank's publisher."""

    rank: int
    endpoint: str
    replay_endpoint: str


class _Event(msgspec.Struct):
    """An event of any kind, of SGLang 0.5.23 (`srt/disaggregation/kv_events.py`)."""

    type: str
    block_hashes: list[int] = []
    parent_block_hash: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Event]
    attn_dp_rank: int | None = None


_decode = msgspec.msgpack.Decoder(_Batch).decode
_CHANGES = {
    "BlockStored": BlockChange.STORED,
    "BlockRemoved": BlockChange.REMOVED,
    "AllBlocksCleared": BlockChange.CLEARED,
}


def translated(payload: bytes, rank: int) -> Iterator[BlockEvent]:
    """Yield the events of a batch; unknown kinds are left out. Raises `msgspec.DecodeError`."""
    for event in _decode(payload).events:
        if (change := _CHANGES.get(event.type)) is not None:
            yield BlockEvent(
                change,
                rank,
                tuple(event.block_hashes),
                event.parent_block_hash,
                event.medium or GPU,
                event.lora_name,
            )


@define(eq=False)
class KvEventReceiver:
    """Receives the events of one rank into a log."""

    source: EventSource
    log: BlockLog
    _next: int = 0  # the number of the batch that is expected
    _complete: bool = False  # nothing has come since all that there is was asked for

    async def run(self) -> None:
        """Receive until cancelled; a failure is printed and costs the rank's blocks, and then all begins anew."""
        retry_s = RETRY_S
        while True:
            number = self._next
            try:
                await self._receive()
            except Exception as error:  # noqa: BLE001  # an error of ZMQ, or a changed format of SGLang's: no request depends on it
                traceback.print_exception(error, file=sys.stderr)
            self._forget()
            retry_s = RETRY_S if self._next != number else min(2 * retry_s, RETRY_MAX_S)
            self._next, self._complete = 0, False
            await asyncio.sleep(retry_s)

    async def _receive(self) -> None:
        context = zmq.asyncio.Context.instance()
        subscriber = context.socket(zmq.SUB)
        try:
            subscriber.set_hwm(QUEUE_MAX)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(self.source.endpoint)
            await self._replay(context)
            while True:
                if await subscriber.poll(None if self._complete else IDLE_MS):
                    _, number, payload = await subscriber.recv_multipart()
                    self._complete = False
                    await self._received(context, int.from_bytes(number, "big"), payload)
                else:
                    await self._replay(context)
                    self._complete = True
        finally:
            subscriber.close(linger=0)

    async def _received(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if number > self._next:
            await self._replay(context)
        if number > self._next:
            self._forget()
            self._next = number
        self._apply(number, payload)
        await asyncio.sleep(0)  # the next one may have come already: it is then received without a wait

    def _apply(self, number: int, payload: bytes) -> None:
        if number == self._next:  # else it has come before
            self._next += 1
            self.log.apply(translated(payload, self.source.rank))

    def _forget(self) -> None:
        self.log.apply([BlockEvent(BlockChange.CLEARED, self.source.rank)])

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Apply the batches from the expected one on, as far as the scheduler's buffer has them."""
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.set_hwm(QUEUE_MAX)
            dealer.connect(self.source.replay_endpoint)
            await dealer.send_multipart([b"", self._next.to_bytes(8, "big")])
            async with asyncio.timeout(REPLAY_S):
                while True:
                    *_, number, payload = await dealer.recv_multipart()
                    if number == END:
                        return
                    first = int.from_bytes(number, "big")
                    if first > self._next:  # the buffer does not go back so far
                        self._forget()
                        self._next = first
                    self._apply(first, payload)
                    await asyncio.sleep(0)  # as in `_received`
        finally:
            dealer.close(linger=0)


@define(eq=False)
class KvEventReceivers:
    """The receivers of all ranks of this host, each in a task."""

    log: BlockLog
    sources: tuple[EventSource, ...]
    _tasks: list[asyncio.Task[None]] = field(factory=list)

    def start(self) -> None:
        """Begin to receive."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(KvEventReceiver(source, self.log).run()) for source in self.sources]

    async def stop(self, within_s: float) -> None:
        """Close all sockets; print a warning if that takes longer than `within_s`."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=within_s)
            if pending:
                sys.stderr.write(f"{len(pending)} receivers of KV events were not closed within {within_s} s\n")
