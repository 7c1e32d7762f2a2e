"""TensorRT-LLM's events of its KV memory as the project's: the same blocks under the project's own hashes.

TensorRT-LLM names blocks by hashes of its own, and gives the tokens of a block when it is stored. A block's hash here
follows from these and from the digest of the block before it, as everywhere (`protocol/block_hashes.py`). So each rank
keeps a table of its blocks, of which there are as many as its memory holds.

The events of a rank are numbered. After a gap all of its blocks are forgotten, and a block is known again only with all
blocks before it. Layers of attention with a smaller window report the same blocks once more, and are left out. So are
blocks that are not full, and blocks of images, since every image has the same tokens. No event names the adapter of a
block: the salt of its request does (`Generate.cache_namespace`), so a router finds it by its hash as any other one.
Versions before 1.3 do not report the salt of a block, so their salted blocks count as unsalted: no answer depends on
it, but the choice of an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from attrs import define, field, frozen

from protocol.block_hashes import block_digests, block_hash, root_digest
from protocol.messages.kv_events import GPU, BlockChange, BlockEvent
from protocol.token_ids import TokenIds

HOST = "CPU_PINNED"
"""The medium of blocks that have been moved out of GPU memory: all levels of TensorRT-LLM's caches but the first."""

CREATED, STORED, REMOVED, UPDATED = "created", "stored", "removed", "updated"
_Fields = Mapping[str, object]


@frozen
class _Block:
    """A block that is in the memory; its digest is that of its whole prefix."""

    digest: bytes
    medium: str

    @property
    def hash(self) -> int:
        return block_hash(self.digest)


@define
class _Rank:
    next: int | None = None  # the number of the next event, None before the first
    blocks: dict[int, _Block] = field(factory=dict)  # by TensorRT-LLM's own hashes


def _same(salt: str | None) -> str | None:
    return salt


@define
class BlockTranslator:
    """Translates the events of all ranks, in the order in which they come.

    `own_salt` returns a request's salt from the one that its engine was given, since a host may change salts.
    """

    page_size: int
    ranks: int = 1
    own_salt: Callable[[str | None], str | None] = _same
    _ranks: dict[int, _Rank] = field(init=False, factory=dict)
    _window: int = field(init=False, default=0)  # the largest one

    def translate(self, event: _Fields) -> Iterator[BlockEvent]:
        """Yield the changes by one event; an event of an unknown form changes nothing."""
        rank, data = event.get("attention_dp_rank") or 0, _fields(event.get("data"))
        if not isinstance(rank, int) or not 0 <= rank < self.ranks:
            return
        table = self._ranks.setdefault(rank, _Rank())
        if not self._follows(table, event.get("event_id")):
            table.blocks.clear()
            yield BlockEvent(BlockChange.CLEARED, rank)
        window = event.get("window_size")
        if isinstance(window, int) and window != self._window:
            if window < self._window:
                return
            if any(each.blocks for each in self._ranks.values()):  # of a smaller window, whose creation was missed
                yield from self.forget()
            self._window = window
        match data.get("type"):
            case "stored":
                yield from self._stored(table, rank, data)
            case "removed":
                yield from _removed(table, rank, _items(data.get("block_hashes")))
            case "updated":
                yield from _moved(table, rank, data)

    def forget(self) -> Iterator[BlockEvent]:
        """Yield the loss of all blocks, as when the memory is released, which is in no event."""
        for rank, table in self._ranks.items():
            table.blocks.clear()
            yield BlockEvent(BlockChange.CLEARED, rank)

    def _follows(self, table: _Rank, number: object) -> bool:
        """Whether no event has been missed before this one."""
        if not isinstance(number, int):
            return False
        follows = table.next is None or number == table.next
        table.next = number + 1
        return follows

    def _stored(self, table: _Rank, rank: int, data: _Fields) -> Iterator[BlockEvent]:
        """Yield the stored blocks up to one that is not full; none without a known block before them."""
        blocks = [_fields(each) for each in _items(data.get("blocks"))]
        salts, parent = {_text(each.get("cache_salt")) for each in blocks}, data.get("parent_hash")
        before = table.blocks.get(parent) if isinstance(parent, int) else None
        if len(salts) != 1 or (parent is not None and before is None):
            return
        digest = root_digest(self.own_salt(next(iter(salts)))) if before is None else before.digest
        stored = list[_Block]()
        for block in blocks:
            tokens, own = self._tokens(block), block.get("block_hash")
            if tokens is None or not isinstance(own, int):
                break
            (digest,) = block_digests(digest, tokens.packed, self.page_size)
            table.blocks[own] = _Block(digest, _medium(block.get("cache_level")))
            stored.append(table.blocks[own])
        for medium, run in _runs(stored):
            place = stored.index(run[0])
            first = stored[place - 1].hash if place else None if before is None else before.hash
            yield BlockEvent(BlockChange.STORED, rank, tuple(each.hash for each in run), first, medium)

    def _tokens(self, block: _Fields) -> TokenIds | None:
        """Return the tokens of a full block of text, None for any other one."""
        found = [_fields(each) for each in _items(block.get("tokens"))]
        ids = [each.get("token_id") for each in found]
        if len(ids) != self.page_size or block.get("mm_keys") or any(each.get("token_extra_id") for each in found):
            return None
        try:
            return TokenIds.of(cast("list[int]", ids))
        except (TypeError, OverflowError):
            return None


def _removed(table: _Rank, rank: int, hashes: Sequence[object]) -> Iterator[BlockEvent]:
    """Yield the removal of the known ones of the blocks."""
    found = [block for each in hashes if isinstance(each, int) and (block := table.blocks.pop(each, None)) is not None]
    yield from _events(BlockChange.REMOVED, rank, found)


def _moved(table: _Rank, rank: int, data: _Fields) -> Iterator[BlockEvent]:
    """Yield the move of a block to another medium."""
    own, level = data.get("block_hash"), _fields(data.get("cache_level")).get("new_value")
    block = table.blocks.get(own) if isinstance(own, int) else None
    if block is None or level is None or _medium(level) == block.medium:
        return
    assert isinstance(own, int)
    table.blocks[own] = moved = _Block(block.digest, _medium(level))
    yield from _events(BlockChange.REMOVED, rank, [block])
    yield from _events(BlockChange.STORED, rank, [moved])


def _events(change: BlockChange, rank: int, blocks: Sequence[_Block]) -> Iterator[BlockEvent]:
    """Yield one event for each run of blocks of one medium."""
    for medium, run in _runs(blocks):
        yield BlockEvent(change, rank, tuple(each.hash for each in run), None, medium)


def _runs(blocks: Sequence[_Block]) -> Iterator[tuple[str, list[_Block]]]:
    run = list[_Block]()
    for block in blocks:
        if run and block.medium != run[0].medium:
            yield run[0].medium, run
            run = []
        run.append(block)
    if run:
        yield run[0].medium, run


def _medium(level: object) -> str:
    return HOST if isinstance(level, int) and level > 0 else GPU


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _fields(value: object) -> _Fields:
    return cast("_Fields", value) if isinstance(value, Mapping) else {}


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()
