"""The port of an encoder: an engine for images and videos, as the actors see it.

An encoder computes one *batch* of items at a time, and while it computes it cannot be interrupted: SGLang's blocks the
event loop of its process. So an abort takes effect between batches, and the node makes a batch as late as it can: it
keeps items until the engine is free, and then gives it only items with askers. An encoder decides nothing about
priorities, retries, deadlines or caches; these are the actor's.

`tests/contracts/encoder.py` checks every kind, beyond the types: the embeddings of an item depend on its pixels and its
grid alone, not on its neighbours in a batch; and a wrong item fails alone.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from actors.kit.calls import Answer
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.messages.media import EmbeddingBatch, EncodeBatch

BatchAnswer: TypeAlias = Answer[EmbeddingBatch, EmbeddingBatch]
"""The answer to one batch: no replies, then its result."""


class Encoder(Protocol):
    """One encoder, in this process or another.

    The submitter chooses the id of a batch, which is valid from `submit` on. When the answer is over, the batch is
    released.
    """

    @property
    def info(self) -> EngineInfo:
        """The encoder's kind and version, the items of one batch (`running_max`), and its embeddings (`media`)."""

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        """Start a batch, or let it wait behind the running one; never blocks.

        The items may be images and videos in any order; each has been checked by `check_pixels` of `media_check.py`.
        One batch at least may wait. Raises `BadRequest` for a batch without items or with more than `running_max`,
        `Overloaded` if no further one may wait, `TooLarge` if it cannot be sent to the engine's process, and
        `EngineLost` if the engine died.
        """

    def abort(self, batch_id: str) -> None:
        """Stop a batch: a waiting one at once, the running one by dropping its result.

        It may be called at any moment from `submit` on, any number of times, also after the end.
        """

    async def wait_released(self, batch_id: str) -> None:
        """Wait until the engine itself reports the batch's release."""

    async def wait_lost(self) -> None:
        """Wait until the engine is lost, for any reason."""

    async def load(self) -> EngineLoad:
        """Return the engine's own counts of running and waiting items."""
