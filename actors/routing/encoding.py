"""The encode leg of a request: its images and videos to embeddings, before an engine is asked to compute with them.

The items of a request are encoded concurrently, each by one encoder, and all of them or none. Among encoders with room
an item goes to the highest by rendezvous hashing of its digest, so that all routers send the same image to the same
cache.

A lost encoder costs its items one attempt (`whole_work.py`). Encoders compute items of many requests in one batch, so
any item of it may have crashed the encoder: each is encoded alone from then on, and an item that crashes encoders alone
fails by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

from attrs import frozen

from actors.kit.spans import Spans, asking
from actors.routing.ports import EncoderPool, RoutedEncoder, RoutingObserver
from actors.routing.route import FailoverLimits
from actors.routing.whole_work import WholeWork, WithLoads, all_or_none
from protocol.messages.media import Encode, Encoded, MediaForm, MediaItem
from protocol.trace import Trace

NO_ENCODER = "no encoder of this model is up, and images and videos need one"


@frozen
class EncodeWork:
    """Items to encode, for one request."""

    id: str
    items: tuple[MediaItem, ...]
    priority: int = 0
    owner: str = ""
    trace: Trace | None = None


@frozen
class Encoding:
    """The encode leg of one model: its encoders, and the limits on losing some."""

    pool: EncoderPool
    limits: FailoverLimits
    new_id: Callable[[], str]
    observer: RoutingObserver = RoutingObserver()
    spans: Spans = Spans()

    async def embeddings(self, work: EncodeWork) -> tuple[MediaItem, ...]:
        """Return the items with embeddings in place of pixels; an item without pixels stays as it is.

        Raises the `RequestError` of the first item that cannot be encoded.
        """
        traced = partial(asking, self.spans, work.trace, self.new_id, "encode")
        encoders = WholeWork(self.pool.encoders, self.pool.wait_changed, self.limits, self.observer, NO_ENCODER, traced)

        async def embedded(item: MediaItem) -> MediaItem:
            def make(crashes: int, trace: Trace | None) -> Encode:
                return Encode(self.new_id(), item, work.priority, trace, work.owner, alone=crashes > 0)

            def prefer(candidates: WithLoads[Encode, Encoded]) -> RoutedEncoder:
                return max(candidates, key=lambda candidate: rank(item.digest, candidate[0].full_name))[0]

            return (await encoders.result(make, prefer)).item

        items = list(work.items)
        pixels = [index for index, item in enumerate(items) if item.form is MediaForm.PIXELS]
        encoded = await all_or_none([items[index] for index in pixels], embedded, at_once=len(pixels))
        for index, item in zip(pixels, encoded, strict=True):
            items[index] = item
        return tuple(items)


def rank(digest: str, name: str) -> bytes:
    """Return the rank of an encoder for a digest, by rendezvous hashing: each digest orders the names differently."""
    return blake2b(f"{digest} {name}".encode(), digest_size=8).digest()


def placed(items: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Return the items without their tensors, as a decode gets them: its prefill has the embeddings."""
    return tuple(item.place for item in items)
