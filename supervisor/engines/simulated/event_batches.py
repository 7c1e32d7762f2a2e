"""The changes of a simulated engine's prefix cache in the form in which SGLang publishes them, numbered and kept.

A batch is a msgpack array of a time, the events and a rank; an event is a map with its class as `type`, as SGLang
0.5.23 has them (`srt/disaggregation/kv_events.py`). The latest batches are kept for those who have missed some, and for
the socket that has not sent them yet: what it does not send in time is left out, which subscribers see by the numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio
from attrs import define, field
from msgspec import msgpack

from actors.engines.simulated.cache_events import CacheChange
from protocol.kv_events import BlockChange

TOPIC = b"kv-events"
NUMBER_BYTES = 8
KEPT_MAX = 10_000  # batches, as many as SGLang keeps
KEPT_BYTES_MAX = 16 * 2**20

Batch = tuple[bytes, bytes]
"""The number of a batch, big-endian, and its payload."""


def encoded(changes: Sequence[CacheChange], page_size: int, at_s: float) -> bytes:
    """Return the payload of one batch, at a time in seconds since 1970."""
    return msgpack.encode([at_s, [_event(change, page_size) for change in changes], 0])


def _event(change: CacheChange, page_size: int) -> dict[str, object]:
    event = change.event
    match event.change:
        case BlockChange.STORED:
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": change.tokens,
                "block_size": page_size,
                "lora_id": None,
                "medium": event.medium,
            }
        case BlockChange.REMOVED:
            return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
        case BlockChange.CLEARED:
            return {"type": "AllBlocksCleared"}


@define(eq=False)
class EventBatches:
    """The batches of one engine, in all of its lives; `now` returns seconds since 1970."""

    page_size: int
    now: Callable[[], float]
    _number: int = 0  # of the next batch
    _next: int = 0  # the number of the first that has not been sent
    _kept: deque[Batch] = field(factory=lambda: deque[Batch](maxlen=KEPT_MAX))
    _kept_bytes: int = 0
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def put(self, changes: Sequence[CacheChange]) -> None:
        """Add a batch; nothing is waited for."""
        batch = self._number.to_bytes(NUMBER_BYTES, "big"), encoded(changes, self.page_size, self.now())
        self._number += 1
        if len(self._kept) == KEPT_MAX:
            self._forget()
        self._kept.append(batch)
        self._kept_bytes += len(batch[1])
        while self._kept_bytes > KEPT_BYTES_MAX:
            self._forget()
        self._changed.unpark_all()

    def _forget(self) -> None:
        self._kept_bytes -= len(self._kept.popleft()[1])

    async def next(self) -> Batch:
        """Wait for the next batch that has not been sent and is still kept, and count it as sent."""
        await trio.lowlevel.checkpoint()
        while not (unsent := min(self._number - self._next, len(self._kept))):
            await self._changed.park()
        self._next = self._number - unsent + 1
        return self._kept[-unsent]

    def since(self, number: int) -> list[Batch]:
        """Return the batches from a number on, as far back as they are kept."""
        first = self._number - len(self._kept)
        return list(self._kept)[max(0, number - first) :]
