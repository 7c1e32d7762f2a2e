"""The changes of a simulated engine's prefix cache, as the events that SGLang would publish.

Neighbouring changes of one kind become one event, as SGLang merges them: a step's stored pages of one prompt, or all
pages evicted for a request.
"""

from __future__ import annotations

from attrs import define, evolve, field

from protocol.block_hashes import block_hash
from protocol.messages.kv_events import BlockChange, BlockEvent


@define(eq=False)
class CacheEvents:
    """The changes since they were taken last."""

    rank: int = 0  # the engine's rank with the cache
    _events: list[BlockEvent] = field(factory=list)
    _last: list[int] = field(factory=list)  # the hashes of the last event

    def stored(self, digest: bytes, before: bytes | None) -> None:
        """Note a page that is cached from now on, behind another one."""
        number, parent = block_hash(digest), None if before is None else block_hash(before)
        if not self._joins(BlockChange.STORED) or self._last[-1:] != [parent]:
            self._begin(BlockEvent(BlockChange.STORED, self.rank, parent=parent))
        self._last.append(number)

    def removed(self, digest: bytes) -> None:
        """Note a page that is not cached any more."""
        if not self._joins(BlockChange.REMOVED):
            self._begin(BlockEvent(BlockChange.REMOVED, self.rank))
        self._last.append(block_hash(digest))

    def cleared(self) -> None:
        """Note that nothing is cached any more."""
        self._begin(BlockEvent(BlockChange.CLEARED, self.rank))

    def take(self) -> list[BlockEvent]:
        """Return the changes, in their order, and forget them."""
        if not self._events:
            return []
        self._close()
        taken, self._events, self._last = self._events, [], []
        return taken

    def _joins(self, change: BlockChange) -> bool:
        return bool(self._events) and self._events[-1].change is change

    def _begin(self, event: BlockEvent) -> None:
        self._close()
        self._events.append(event)
        self._last = []

    def _close(self) -> None:
        if self._events and self._last:
            self._events[-1] = evolve(self._events[-1], hashes=tuple(self._last))
