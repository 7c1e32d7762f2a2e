"""The changes of a simulated engine's prefix cache, as the events by which SGLang would tell of them.

Neighbouring changes of one kind become one event, as SGLang merges them: the pages that a step has stored of one
prompt, or all that had to go for a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from protocol.block_hashes import block_hash
from protocol.kv_events import BlockChange, BlockEvent


@frozen
class CacheChange:
    """An event, and the tokens of the pages that it stores if those are kept."""

    event: BlockEvent
    tokens: tuple[int, ...] = ()


@define(eq=False)
class CacheEvents:
    """The changes since they were taken last; with `keeps_tokens` those of stored pages are kept, too."""

    keeps_tokens: bool = False
    rank: int = 0  # of the engine, whose cache it is
    _events: list[BlockEvent] = field(factory=list)
    _last: list[int] = field(factory=list)  # the hashes of the last event
    _tokens: list[list[int]] = field(factory=list)  # of each event

    def stored(self, digest: bytes, before: bytes | None, tokens: Sequence[int] = ()) -> None:
        """Note a page that is cached from now on, behind another one."""
        number, parent = block_hash(digest), None if before is None else block_hash(before)
        if not self._joins(BlockChange.STORED) or self._last[-1:] != [parent]:
            self._begin(BlockEvent(BlockChange.STORED, self.rank, parent=parent))
        self._last.append(number)
        if self.keeps_tokens:
            self._tokens[-1].extend(tokens)

    def removed(self, digest: bytes) -> None:
        """Note a page that is not cached any more."""
        if not self._joins(BlockChange.REMOVED):
            self._begin(BlockEvent(BlockChange.REMOVED, self.rank))
        self._last.append(block_hash(digest))

    def cleared(self) -> None:
        """Note that nothing is cached any more."""
        self._begin(BlockEvent(BlockChange.CLEARED, self.rank))

    def take(self) -> list[CacheChange]:
        """Return the changes, in their order, and forget them."""
        if not self._events:
            return []
        self._close()
        taken = [CacheChange(*each) for each in zip(self._events, map(tuple, self._tokens), strict=True)]
        self._events, self._last, self._tokens = [], [], []
        return taken

    def _joins(self, change: BlockChange) -> bool:
        return bool(self._events) and self._events[-1].change is change

    def _begin(self, event: BlockEvent) -> None:
        self._close()
        self._events.append(event)
        self._tokens.append([])
        self._last = []

    def _close(self) -> None:
        if self._events and self._last:
            self._events[-1] = evolve(self._events[-1], hashes=tuple(self._last))
