"""Events of the KV memory of engines, and their loads, as streams that anybody may follow.

A `WatchBlocks` or a `WatchLoad` is answered by replies until the asker leaves, or until its credit is used up, which
ends the answer with `Done`; then it asks again, from where it was. So a slow asker costs its answerer nothing: what it
has missed it gets as a whole.

Events are numbered through one *life* of an engine's cache. An asker that names a life and the number of the last event
that it has applied gets the events after it; if they are not kept any more, or the life is another, it gets all blocks
that are there, of which the first reply has `reset`. Until the last of those, their `number` is 0: an asker that is
interrupted in between begins anew.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from protocol.errors import PeerViolation
from protocol.messages.cluster import RANKS_MAX
from protocol.messages.engine import Done
from protocol.messages.kind import Kind, Message

LIFE_LENGTH_MAX = 64
HASHES_MAX = 1024
"""The most block hashes in one reply: an asker applies them in one turn."""

REPLY_HASHES_MAX = 512
"""The most that a publisher sends in one: they are applied in well under a millisecond."""

REPLY_BYTES_MAX = 512 * 1024
"""The most bytes of one encoded reply: an asker may not take it at once, and other replies wait behind it."""

GPU = "GPU"
"""The medium of blocks that a prefill can use at once; SGLang also names `CPU_PINNED`, `DISK` and `EXTERNAL`."""


class BlockChange(StrEnum):
    """A change of blocks."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # all blocks of the rank


@frozen
class BlockEvent:
    """Blocks that one rank of an engine has stored or removed, by their hashes, those of one prefix in its order.

    `parent` is the block before the first one, None at the beginning of a prompt and where it is not known. Blocks of a
    LoRA adapter have its name as `lora`: their hashes are those of no other prompt.
    """

    change: BlockChange
    rank: int = 0
    hashes: tuple[int, ...] = ()
    parent: int | None = None
    medium: str = GPU
    lora: str | None = None


@frozen
class WatchBlocks(Message):
    """Follow which blocks are in an engine's prefix cache, from after the event `since` of a `life`."""

    life: str = ""
    since: int = 0


@frozen
class BlockEvents(Message):
    """The next events of an engine; `number` is that of the last one, 0 within an incomplete list of all blocks.

    With `reset`, all that was known of the engine's blocks is to be forgotten first.
    """

    life: str
    number: int
    events: tuple[BlockEvent, ...]
    reset: bool = False


@frozen
class WatchLoad(Message):
    """Follow the load of an engine, as its scheduler counts it; replies come when it has changed."""


@frozen
class RankLoad:
    """The load of one rank of an engine, as its scheduler counts it; `hit_rate` is from 0 to 1.

    `waiting_tokens` are those of the prompts that wait and are not in the cache, `throughput` the generated tokens a
    second.
    """

    running: int = 0
    slots: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens_used: int = 0
    kv_tokens_max: int = 0
    hit_rate: float = 0.0
    throughput: float = 0.0


@frozen
class EngineLoads(Message):
    """The loads of an engine's ranks, in their order."""

    ranks: tuple[RankLoad, ...]


def check_block_events(message: BlockEvents) -> None:
    """Raise `PeerViolation` for events that cannot be true, or are too many for one reply."""
    events = message.events
    if not 0 < len(message.life) <= LIFE_LENGTH_MAX or message.number < 0:
        raise PeerViolation("a life or a number of events that cannot be")
    if sum(max(1, len(event.hashes)) for event in events) > HASHES_MAX:
        raise PeerViolation(f"events of more than {HASHES_MAX} blocks at once")
    if any(not 0 <= event.rank < RANKS_MAX for event in events):
        raise PeerViolation("events of a rank that cannot be")


KINDS = (
    Kind(41, WatchBlocks, replies=(BlockEvents,), result=Done),
    Kind(42, BlockEvents),
    Kind(43, WatchLoad, replies=(EngineLoads,), result=Done),
    Kind(44, EngineLoads),
)
