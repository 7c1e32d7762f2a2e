"""The port of an encoder: what the actors know of an engine that turns images and videos into embeddings.

An encoder computes one *batch* of items at a time, and while it computes it cannot be interrupted: SGLang's blocks the
event loop of its process. So an abort takes effect between batches, and the node decides what a batch is, as late as it
can: it keeps items until the engine is free for them, and gives it those that somebody still waits for. An encoder
decides nothing about priorities, retries, deadlines or caches; those are the actor's.

`tests/contracts/encoder.py` checks every kind, also what no type says: the embeddings of an item depend on its pixels
and its grid alone, not on its neighbours in a batch; and an item that is wrong fails alone.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from actors.kit.calls import Answer
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.messages.media import BatchEncoded, EncodeBatch

EncodingBatch: TypeAlias = Answer[BatchEncoded, BatchEncoded]
"""The answer to one batch: no replies, then its result."""


class Encoder(Protocol):
    """One encoder, in this process or another.

    The id of a batch is chosen by whoever submits it and valid from `submit` on. An answer that is over has released
    what the batch held.
    """

    @property
    def info(self) -> EngineInfo:
        """The encoder's kind and version, the items of one batch (`running_max`), and what it makes (`media`)."""

    def submit(self, batch: EncodeBatch) -> EncodingBatch:
        """Start a batch, or let it wait behind the one that is being computed; never blocks.

        The items may be images and videos in any order; each has been checked by `check_pixels` of `media_check.py`.
        One batch at least may wait. Raises `BadRequest` for a batch without items or with more than `running_max`,
        `Overloaded` if no further one may wait, `TooLarge` if it cannot be sent to the engine's process, and
        `EngineLost` if the engine died.
        """

    def abort(self, batch_id: str) -> None:
        """Stop a batch: one that waits at once, one that is being computed by dropping its result.

        It may be called at any moment from `submit` on, any number of times, also after the end.
        """

    async def wait_released(self, batch_id: str) -> None:
        """Wait until the engine itself reports that it holds nothing for the batch any more."""

    async def wait_lost(self) -> None:
        """Wait until the engine is lost, for any reason."""

    async def load(self) -> EngineLoad:
        """Return the engine's own count of its items: those of the batch that it computes, and those that wait."""
