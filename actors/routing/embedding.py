"""The requests to a model of vectors, or of scores: the parts of each, by any of the model's embedders.

Parts are asked for concurrently, each of the least busy embedder with room, and all of them are computed or none. A
part is idempotent, so a lost embedder costs it one attempt (`whole_work.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from attrs import frozen

from actors.kit.spans import Spans, asking
from actors.routing.ports import EmbedderPool, RoutingObserver
from actors.routing.route import FailoverLimits
from actors.routing.whole_work import WholeWork, all_or_none
from protocol.errors import InternalError
from protocol.messages.embedding import Embed, TextItem, Vectors
from protocol.trace import Trace

PARTS_AT_ONCE = 8
"""The most parts of one request that are asked for at once."""

NO_EMBEDDER = "no engine of this model is up"


@frozen
class EmbedWork:
    """The parts of one request; `dimensions` is the length of each vector, None for the model's own."""

    id: str
    parts: tuple[tuple[TextItem, ...], ...]
    dimensions: int | None = None
    priority: int = 0
    owner: str = ""
    trace: Trace | None = None


EmbedParts: TypeAlias = Callable[[EmbedWork], Awaitable[tuple[Vectors, ...]]]
"""A function that returns the vectors of each part: `Embedding.vectors`."""


@frozen
class Embedding:
    """The embedders of one model, and the limits on losing some."""

    pool: EmbedderPool
    limits: FailoverLimits
    new_id: Callable[[], str]
    observer: RoutingObserver = RoutingObserver()
    spans: Spans = Spans()

    async def vectors(self, work: EmbedWork) -> tuple[Vectors, ...]:
        """Return the vectors of each part, all of one length; raises the `RequestError` of the first that fails."""
        traced = partial(asking, self.spans, work.trace, self.new_id, "embed")
        embedders = WholeWork(
            self.pool.embedders, self.pool.wait_changed, self.limits, self.observer, NO_EMBEDDER, traced
        )

        async def computed(part: tuple[TextItem, ...]) -> Vectors:
            def make(_: int, trace: Trace | None) -> Embed:
                return Embed(self.new_id(), part, work.dimensions, work.priority, work.owner, trace)

            vectors = await embedders.result(make)
            if (number := vectors.data.shape[0]) != len(part):
                raise InternalError(f"an embedder returned {number} vectors for {len(part)} items")
            return vectors

        vectors = await all_or_none(work.parts, computed, at_once=PARTS_AT_ONCE)
        if len(widths := {each.data.shape[1] for each in vectors}) > 1:
            raise InternalError(f"embedders of one model returned vectors of {sorted(widths)} elements")
        return tuple(vectors)
