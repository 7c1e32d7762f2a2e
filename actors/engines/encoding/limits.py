"""The limits of an encoder, and the observer of what becomes of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from attrs import define, frozen

from protocol.messages.media import Encode, MediaItem
from protocol.strict.checks import Within

Number = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]


@frozen(kw_only=True)
class BatchLimits:
    """`[engine.NAME.encoder]`: the limits of batches, and of the embeddings that are kept."""

    batch_max: Number = 8  # images and videos of one batch
    batch_tokens_max: Number = 16_384  # tokens of one batch; a larger item is a batch alone
    # memory for embeddings that are kept, the most recently used ones; 0 keeps none
    cache_bytes_max: Annotated[int, Within(at_least=0, at_most=10**15)] = 256 * 1024 * 1024


@frozen(kw_only=True)
class EncoderLimits(BatchLimits):
    """The limits of an encoder: the configured ones, and the times, which are constants.

    A batch that has not ended after `batch_s` fails. If the engine holds it for `release_s` more, the engine is stuck.
    """

    batch_wait_s: float = 0.005  # longest wait of a batch's first item for others
    waiting_s: float = 30.0  # longest wait of an item for its batch
    batch_s: float = 60.0
    release_s: float = 5.0


@define(eq=False)
class EncoderObserver:
    """Receives events of one encoder; this one ignores them."""

    def request_ended(self, modality: str, outcome: str) -> None:
        """A request has ended: `encoded`, `cached`, `shared` with an equal one, `left`, or with an error's code."""

    def ended(self, request: Encode, outcome: str, began_at: float) -> bool:  # noqa: ARG002
        """The same, of a request that had its slot at `began_at`; return whether its span is recorded."""
        return False

    def queue_changed(self, waiting: int, computing: int) -> None:
        """The numbers of distinct items waiting for a batch, and in the computed batch, have changed to these."""

    def waited(self, seconds: float) -> None:
        """An item is in a batch, `seconds` after its first asker came."""

    def batch_ended(self, items: Sequence[MediaItem], outcome: str, seconds: float) -> None:
        """A batch has ended: `ended`, `left` by all, or with an error's code."""

    def aborted(self, seconds: float) -> None:
        """The engine has released a batch, `seconds` after its last asker had left."""
