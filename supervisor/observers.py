"""Observers that count the events of actors in the metrics of a node.

Actors do not import metrics, and metrics do not import actors: each actor defines the class of its observer, and the
subclasses here connect the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio
from attrs import define, field, frozen

from actors.canary import ANSWERED, CanaryObserver
from actors.encoder import CACHED, COMPUTED, SHARED
from actors.engines.embedding.limits import EmbedderObserver
from actors.engines.encoding.limits import EncoderObserver
from actors.engines.outcomes import ENDED
from actors.engines.slots.slots import SlotObserver
from actors.kit.spans import Attribute, Span, SpanKind, Spans
from actors.routing.pools.service_levels import ServiceLevels
from actors.routing.ports import RoutingObserver
from protocol.errors import AskerLeft
from protocol.messages.embedding import Embed
from protocol.messages.generation import Generate
from protocol.messages.media import Encode, MediaItem
from supervisor.telemetry.metrics import Metrics


def _ignore(_: str) -> None:
    pass


@define(eq=False)
class SlotMetrics(SlotObserver):
    """The metrics of one engine's slots."""

    metrics: Metrics
    engine: str
    spans: Spans = field(factory=Spans)
    on_begun: Callable[[str], None] = _ignore  # called with the id of a request when its prompt has been computed

    def begun(self, request_id: str) -> None:
        """Report that the prompt of a request has been computed."""
        self.on_begun(request_id)

    def ended(self, request: Generate, outcome: str, began_at: float, first_at: float | None) -> bool:
        """Record the span of a request from when it had its slot, if spans are exported here."""
        trace = request.trace
        if trace is None or not self.spans.takes(trace):
            return False
        now = trio.current_time()
        attributes: dict[str, Attribute] = {
            "espalier.worker": self.engine,
            "espalier.outcome": outcome,
            "espalier.request.id": request.id,
            "espalier.priority": request.priority,
            "gen_ai.usage.input_tokens": len(request.tokens),
            "gen_ai.request.max_tokens": request.sampling.tokens_max,
            "gen_ai.response.time_to_first_chunk": None if first_at is None else round(first_at - began_at, 6),
        }
        code = "" if outcome in {ENDED, AskerLeft.code} else outcome
        self.spans.record(Span(trace, "compute", began_at, now, attributes, SpanKind.SERVER, code))
        return True

    def aborted(self, seconds: float) -> None:
        """Count the time from a request's cancellation to the release of its slot."""
        self.metrics.aborted(self.engine, seconds)

    def stuck(self, slots: int) -> None:
        """Set the number of slots not released in time."""
        self.metrics.set_stuck_slots(self.engine, slots)


@define(eq=False)
class CanaryMetrics(CanaryObserver):
    """The metrics of one engine's canaries."""

    metrics: Metrics
    engine: str

    def ended(self, rank: int, outcome: str, seconds: float) -> None:
        """Count a canary, and the time of its answer."""
        self.metrics.canary_ended(self.engine, str(rank), outcome)
        if outcome == ANSWERED:
            self.metrics.canary_answered(self.engine, str(rank), seconds)


@frozen
class EncoderMetrics(EncoderObserver):
    """The metrics of one encoder."""

    metrics: Metrics
    engine: str
    spans: Spans = Spans()

    def request_ended(self, modality: str, outcome: str) -> None:
        """Count a request for the embeddings of an item."""
        self.metrics.encoding_ended(self.engine, modality, outcome)

    def ended(self, request: Encode, outcome: str, began_at: float) -> bool:
        """Record the span of an item from when it had its slot, if spans are exported here."""
        trace = request.trace
        if trace is None or not self.spans.takes(trace):
            return False
        attributes: dict[str, Attribute] = {
            "espalier.worker": self.engine,
            "espalier.outcome": outcome,
            "espalier.modality": request.item.modality.value,
            "espalier.item.tokens": request.item.tokens,
        }
        code = "" if outcome in {COMPUTED, CACHED, SHARED, AskerLeft.code} else outcome
        self.spans.record(Span(trace, "compute", began_at, trio.current_time(), attributes, SpanKind.SERVER, code))
        return True

    def queue_changed(self, waiting: int, computing: int) -> None:
        """Set the numbers of items waiting for a batch, and in a batch."""
        self.metrics.set_encoder_queue(self.engine, waiting, computing)

    def waited(self, seconds: float) -> None:
        """Count an item's wait for its batch."""
        self.metrics.encoding_waited(self.engine, seconds)

    def batch_ended(self, items: Sequence[MediaItem], outcome: str, seconds: float) -> None:
        """Count a batch and its items."""
        self.metrics.batch_encoded(self.engine, outcome, seconds)
        for item in items if outcome == ENDED else ():
            self.metrics.item_encoded(self.engine, item.modality, item.tokens)

    def aborted(self, seconds: float) -> None:
        """Count the time from a batch's cancellation to its release by the engine."""
        self.metrics.aborted(self.engine, seconds)


@frozen
class EmbedderMetrics(EmbedderObserver):
    """The metrics of one embedder."""

    metrics: Metrics
    engine: str
    spans: Spans = Spans()

    def request_ended(self, request: Embed, outcome: str, seconds: float) -> None:
        """Count a request, and the items of one that was computed."""
        ended = outcome == ENDED
        self.metrics.embedding_ended(self.engine, outcome, seconds, len(request.items) * ended, request.tokens * ended)

    def ended(self, request: Embed, outcome: str, began_at: float) -> bool:
        """Record the span of a request from when it had its slot, if spans are exported here."""
        trace = request.trace
        if trace is None or not self.spans.takes(trace):
            return False
        attributes: dict[str, Attribute] = {
            "espalier.worker": self.engine,
            "espalier.outcome": outcome,
            "espalier.request.id": request.id,
            "espalier.priority": request.priority,
            "espalier.items": len(request.items),
            "gen_ai.usage.input_tokens": request.tokens,
        }
        code = "" if outcome in {ENDED, AskerLeft.code} else outcome
        self.spans.record(Span(trace, "compute", began_at, trio.current_time(), attributes, SpanKind.SERVER, code))
        return True

    def aborted(self, seconds: float) -> None:
        """Count the time from a request's cancellation to its release by the engine."""
        self.metrics.aborted(self.engine, seconds)


@frozen
class RoutingMetrics(RoutingObserver):
    """The metrics of one model's requests in its router."""

    metrics: Metrics
    model: str
    levels: ServiceLevels = ServiceLevels()

    def call_ended(self, worker: str, outcome: str) -> None:
        """Count the end of a call to a worker, and to its pool if it has one."""
        self.metrics.worker_called(self.model, worker, outcome)
        if pool := self.levels.pool_of(worker):
            self.metrics.pools.called(pool, outcome)

    def diverted(self, pool: str, actual: str) -> None:
        """Count a leg of a request served by another pool than its own."""
        self.metrics.pools.diverted(pool, actual)

    def chosen(self, seconds: float) -> None:
        """Count the time of a choice."""
        self.metrics.route_chosen(self.model, seconds)

    def answer_begun(self, overlap: int | None, cached: int, blind: bool) -> None:
        """Count the tokens of a prompt expected in the prefix cache, and found there."""
        self.metrics.overlap_found(self.model, overlap, cached, blind)

    def call_resumed(self, code: str, sent: int) -> None:
        """Count the resume of a request at another worker, after `sent` tokens for its client."""
        self.metrics.worker_lost(self.model, code, "resumed" if sent else "retried")

    def call_not_resumed(self, code: str) -> None:
        """Count the end of a request that no other worker can resume exactly."""
        self.metrics.worker_lost(self.model, code, "impossible")

    def worker_ejected(self, worker: str, code: str) -> None:
        """Count an ejection of a worker or a pair."""
        self.metrics.worker_ejected(self.model, worker, code)
