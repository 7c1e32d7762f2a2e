"""The log of an engine's blocks: the present ones and the latest changes, for any number of readers.

A reader that is not too far behind gets the missed changes; any other gets all blocks, in parts (a resync). So the log
never grows with the slowness of a reader: it keeps one entry a block, and a limited number of changes. There is no
clock and no waiting here: node and engine host, with different event loops, use the same log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

from attrs import define, evolve, field

from protocol.messages.kv_events import GPU, REPLY_HASHES_MAX, BlockChange, BlockEvent, BlockEvents

HASH_BYTES = 9  # the size of a sent hash, by which the name of an adapter is counted
TAIL_EVENTS_MAX = 8192
TAIL_HASHES_MAX = 262_144  # hashes of these events together, some 15 MB; or as many as there are blocks

_Location: TypeAlias = tuple[int, str, str | None]
"""Blocks of one rank, one medium and one LoRA adapter."""


@define(eq=False)
class BlockLog:
    """The blocks of one engine in one life of the log; `life` is its name."""

    life: str
    number: int = 1  # the latest event's, 1 before the first
    listeners: set[Callable[[], None]] = field(factory=set)  # called after each change
    _blocks: dict[_Location, dict[int, None]] = field(factory=dict)
    _tail: deque[BlockEvent] = field(factory=deque)
    _tail_hashes: int = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return sum(map(len, self._blocks.values()))

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Apply events, in their order."""
        changed = False
        for event in events:
            for part in _parts(event):
                changed = True
                self._apply(part)
                self._keep(part)
                self.number += 1
        if changed:
            self.notify()

    def notify(self) -> None:
        """Call the listeners."""
        for listener in tuple(self.listeners):
            listener()

    def merge(self, message: BlockEvents) -> None:
        """Apply a message from a reader of another log."""
        if message.reset:
            self.clear()
        self.apply(message.events)

    def clear(self) -> None:
        """Forget all blocks: the engine has lost its cache, or its changes are unknown."""
        self.apply([BlockEvent(BlockChange.CLEARED, rank) for rank in {rank for rank, *_ in self._blocks}])

    def changes(self, since: int) -> Iterator[BlockEvent] | None:
        """Return the events after one, None if they are not kept any more."""
        missed = self.number - since
        if not 0 <= missed <= len(self._tail):
            return None
        # Read from the end: most readers have missed little.
        latest = [*islice(reversed(self._tail), missed)]
        return reversed(latest)

    def blocks(self) -> list[tuple[_Location, list[int]]]:
        """Return all blocks by location, a prefix's blocks in its order."""
        return [(location, list(blocks)) for location, blocks in self._blocks.items() if blocks]

    def _keep(self, event: BlockEvent) -> None:
        """Add an event to the tail, and drop the oldest ones beyond its limits.

        After a resync a reader goes on with the changes made meanwhile, which may be as many as there are blocks.
        """
        tail = self._tail
        tail.append(event)
        self._tail_hashes += len(event.hashes)
        hashes_max = max(TAIL_HASHES_MAX, len(self))
        while len(tail) > TAIL_EVENTS_MAX or self._tail_hashes > hashes_max:
            self._tail_hashes -= len(tail.popleft().hashes)

    def _apply(self, event: BlockEvent) -> None:
        if event.change is BlockChange.CLEARED:
            kept = {location: blocks for location, blocks in self._blocks.items() if location[0] != event.rank}
            self._blocks = kept
            return
        blocks = self._blocks.setdefault((event.rank, event.medium, event.lora), {})
        if event.change is BlockChange.STORED:
            blocks.update(dict.fromkeys(event.hashes))
        elif event.lora is not None:
            for number in event.hashes:
                blocks.pop(number, None)
        else:  # SGLang's event lacks the adapter of the blocks
            for location, others in self._blocks.items():
                if location[:2] == (event.rank, event.medium):
                    for number in event.hashes:
                        others.pop(number, None)


def _parts(event: BlockEvent) -> Iterator[BlockEvent]:
    """Yield an event in parts, each of which fits a reply."""
    if len(event.hashes) <= REPLY_HASHES_MAX:
        yield event
        return
    parent = event.parent
    for start in range(0, len(event.hashes), REPLY_HASHES_MAX):
        hashes = event.hashes[start : start + REPLY_HASHES_MAX]
        yield evolve(event, hashes=hashes, parent=parent)
        parent = hashes[-1]


@define(eq=False)
class BlockReader:
    """One reader of a log, from after the event `since` of a `life`."""

    log: BlockLog
    life: str = ""
    since: int = 0
    _parts: Iterator[BlockEvents] | None = None  # the rest of a resync, while it is read

    @property
    def is_caught_up(self) -> bool:
        """Whether all has been read; False while a resync may be incomplete."""
        return self._parts is None and self.since == self.log.number

    def read(self, replies_max: int | None = None) -> BlockEvents | None:
        """Return the next events, None if there are none now.

        A resync that begins now has at most `replies_max` parts. The rest of a larger log is left out: a reader that
        had to begin again would never have all.
        """
        if self._parts is not None:
            if (part := next(self._parts, None)) is not None:
                return part
            self._parts = None
        log = self.log
        changes = log.changes(self.since) if self.life == log.life and self.since else None
        if changes is None:
            self.life, self.since = log.life, log.number
            self._parts = _snapshot(log, replies_max)
            return next(self._parts)
        taken, hashes = list[BlockEvent](), 0
        for event in changes:
            hashes += max(1, len(event.hashes)) + len(event.lora or "") // HASH_BYTES
            if taken and hashes > REPLY_HASHES_MAX:
                break
            taken.append(event)
        if not taken:
            return None
        self.since += len(taken)
        return BlockEvents(log.life, self.since, tuple(taken))


def _snapshot(log: BlockLog, replies_max: int | None) -> Iterator[BlockEvents]:
    """Yield all blocks as they are now, in parts; changes made meanwhile are read afterwards."""
    number = log.number
    blocks = sorted(log.blocks(), key=_is_special)  # copied at once, and cut as the parts are asked for
    total = max(1, sum(-(-len(hashes) // REPLY_HASHES_MAX) for _, hashes in blocks))
    last = total - 1 if replies_max is None else min(total, replies_max) - 1
    parts = (
        (BlockEvent(BlockChange.STORED, rank, tuple(hashes[start : start + REPLY_HASHES_MAX]), None, medium, lora),)
        for (rank, medium, lora), hashes in blocks
        for start in range(0, len(hashes), REPLY_HASHES_MAX)
    )
    # Without a block there is one part, of none.
    for index, part in enumerate(islice(chain(parts, [()]), last + 1)):
        yield BlockEvents(log.life, number if index == last else 0, part, reset=index == 0)


def _is_special(blocks: tuple[_Location, list[int]]) -> bool:
    """Whether blocks are of an adapter or a slower medium: routers need the others first."""
    (_, medium, lora), _ = blocks
    return medium != GPU or lora is not None
