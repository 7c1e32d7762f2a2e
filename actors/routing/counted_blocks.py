"""The blocks that requests on their way count on: for each request the last block that it is expected to find.

Caches drop the ends of prompts first, so as long as this block is there, all before it are. Once it is removed, the
first of the requests that count on it finds less, and computes it again; those that were given to the worker after it
find what it computes.

A worker may tell anything, at any rate: so of one message no more than `LOOKS_MAX` requests look, and a request looks
no more than `ITS_LOOKS_MAX` times until its prompt begins. Then it counts on what it counted on last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice

from attrs import define, field, frozen

from actors.routing.prefix_index import Holder

LOOKS_MAX = 64  # of a message, in some 2 ms
ITS_LOOKS_MAX = 32  # of a request, in some 1 ms


@frozen(eq=False)
class CountedBlock:
    """A block in the cache of a holder; `look` is called when it was removed. `turn` orders the requests of all."""

    holder: Holder
    number: int
    turn: int
    look: Callable[[], None]


@define(eq=False)
class CountedBlocks:
    """The blocks that are counted on, by their holders and their hashes."""

    _blocks: dict[Holder, dict[int, dict[CountedBlock, None]]] = field(factory=dict)

    def __len__(self) -> int:
        """Return how often a block is counted on."""
        return sum(len(counted) for blocks in self._blocks.values() for counted in blocks.values())

    def add(self, counted: CountedBlock) -> None:
        """Count on a block, until it is discarded."""
        self._blocks.setdefault(counted.holder, {}).setdefault(counted.number, {})[counted] = None

    def discard(self, counted: CountedBlock) -> None:
        """Count on a block no more; idempotent."""
        blocks = self._blocks.get(counted.holder, {})
        if (others := blocks.get(counted.number)) is not None:
            others.pop(counted, None)
            if not others:
                del blocks[counted.number]
                if not blocks:
                    del self._blocks[counted.holder]

    def removed(self, holder: Holder, hashes: Collection[int] | None) -> None:
        """Let the first request look that counts on each of some blocks which were removed; None for any block."""
        if (blocks := self._blocks.get(holder)) is None:
            return
        if hashes is not None and blocks.keys().isdisjoint(hashes):
            return
        gone = tuple(blocks) if hashes is None else dict.fromkeys(number for number in hashes if number in blocks)
        for number in islice(gone, LOOKS_MAX):
            if others := blocks.get(number):
                min(others, key=_turn).look()


def _turn(counted: CountedBlock) -> int:
    return counted.turn
