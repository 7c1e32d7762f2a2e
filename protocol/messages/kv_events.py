"""Streams of the events of engines' KV memory.

A `WatchBlocks`, as a `WatchLoad` (`engine.py`), is answered by replies until the asker leaves, or until its credit is
used up: then the answer ends with `Done`, and the asker resumes with a new request. So a slow asker costs its answerer
no memory: missed events are replaced by a resync.

Events are numbered through one *life* of an engine's cache. A request names a life and its last applied event, and gets
the later events. If they are not kept any more, or the life is another, a resync sends all blocks: its first reply has
`reset`, and every reply but the last the `number` 0, so an interrupted asker begins anew.
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
"""The most block hashes in one received reply: an asker applies them in one turn."""

REPLY_HASHES_MAX = 512
"""The most block hashes in one sent reply: they are applied in well under a millisecond."""

REPLY_BYTES_MAX = 512 * 1024
"""The most bytes of one encoded reply: other replies wait behind it until the asker has taken it."""

GPU = "GPU"
"""The medium of blocks in GPU memory, ready for a prefill; SGLang also names `CPU_PINNED`, `DISK` and `EXTERNAL`."""


class BlockChange(StrEnum):
    """A change of blocks."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # all blocks of the rank


@frozen
class BlockEvent:
    """A run of blocks stored or removed by one rank of an engine, by their hashes.

    `parent` is the block before the first one, None at the beginning of a prompt or if unknown. Blocks of a LoRA
    adapter have its name as `lora`, and share no hash with other prompts.
    """

    change: BlockChange
    rank: int = 0
    hashes: tuple[int, ...] = ()
    parent: int | None = None
    medium: str = GPU
    lora: str | None = None


@frozen
class WatchBlocks(Message):
    """Follow the blocks in an engine's prefix cache, from after the event `since` of a `life`."""

    life: str = ""
    since: int = 0


@frozen
class BlockEvents(Message):
    """The next events of an engine; `number` is the last event's, 0 within an incomplete resync.

    With `reset`, a receiver first forgets all blocks of the engine.
    """

    life: str
    number: int
    events: tuple[BlockEvent, ...]
    reset: bool = False


def check_block_events(message: BlockEvents) -> None:
    """Raise `PeerViolation` for impossible events, or too many for one reply."""
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
)
