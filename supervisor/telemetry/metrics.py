"""The metrics of a node: their names, labels, and increments.

Names follow OpenTelemetry's GenAI conventions if there is one (`gen_ai_server_...`), and else Prometheus's habits: a
subject (`espalier_engine_...`), the unit last, and labels from bounded sets. No label ever holds a client's text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

import trio
from attrs import Factory, define, field
from prometheus_client.core import GaugeMetricFamily, Metric

from protocol.errors import AskerLeft
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Usage
from supervisor.threads.queued_writer import QueuedWriter

from . import registry
from .registry import Buckets, Counter, Histogram, LabelValues, Registry, pieces

ENGINE_LOADS = {  # fields of an engine's load, and what they are
    "running": "Requests inside the engine, by its own count",
    "waiting": "Requests that wait inside the engine, by its own count",
    "kv_tokens_used": "KV memory that running requests hold, in tokens, by the engine's own count",
}
SCRAPES_MAX = 4  # concurrent scrapes of the metrics of engines; others wait
NOTHING: Mapping[str, int] = MappingProxyType({})


@define(eq=False)
class PoolMetrics:
    """Calls and diversions of all pools of a gateway."""

    registry: Registry
    _requests: Counter = field(init=False)
    _diversions: Counter = field(init=False)

    def __attrs_post_init__(self) -> None:
        counter = self.registry.counter
        self._requests = counter("espalier_pool_requests", "Calls to workers of a pool, by outcome", "pool outcome")
        self._diversions = counter(
            "espalier_pool_diversions", "Requests mapped to a pool that another stood in for", "pool actual"
        )

    def called(self, pool: str, outcome: str) -> None:
        """Count the end of a call to a worker of a pool: `ended`, `left`, or an error's code."""
        self._requests[pool, outcome] += 1

    def diverted(self, pool: str, actual: str) -> None:
        """Count a request mapped to one pool and served by another; empty: a worker without a pool."""
        self._diversions[pool, actual] += 1


@define(eq=False)
class Metrics:
    """The metrics of one node."""

    registry: Registry = field(factory=Registry)
    scrapes: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(SCRAPES_MAX))
    logs: dict[str, QueuedWriter] = field(factory=dict)  # the logs of the node and of its processes, by name
    pools: PoolMetrics = field(init=False, default=Factory(lambda self: PoolMetrics(self.registry), takes_self=True))
    _first_token: Histogram = field(init=False)
    _gap: Histogram = field(init=False)
    _duration: Histogram = field(init=False)
    _requests: Counter = field(init=False)
    _cancelled: Counter = field(init=False)
    _tokens: Counter = field(init=False)
    _restarts: Counter = field(init=False)
    _refusals: Counter = field(init=False)
    _dropped: Counter = field(init=False)
    _incomplete: Counter = field(init=False)
    _calls: Counter = field(init=False)
    _ejections: Counter = field(init=False)
    _resumes: Counter = field(init=False)
    _choices: Histogram = field(init=False)
    _overlaps: Counter = field(init=False)
    _predictions: Counter = field(init=False)
    _abort_duration: Histogram = field(init=False)
    _grammar_checks: Histogram = field(init=False)
    _media_preparations: Histogram = field(init=False)
    _stuck_slots: Counter = field(init=False)
    _canaries: Counter = field(init=False)
    _canary_times: Histogram = field(init=False)
    _encodings: Counter = field(init=False)
    _encoder_queue: Counter = field(init=False)
    _encoding_waits: Histogram = field(init=False)
    _batches: Histogram = field(init=False)
    _embedding_times: Histogram = field(init=False)
    _embedded_items: Counter = field(init=False)
    _embedded_tokens: Counter = field(init=False)
    _encoded_items: Counter = field(init=False)
    _encoded_tokens: Counter = field(init=False)

    def __attrs_post_init__(self) -> None:
        counter, histogram = self.registry.counter, self.registry.histogram
        self._first_token = histogram("gen_ai_server_time_to_first_token", "Time to the first token", "model")
        self._gap = histogram("gen_ai_server_time_per_output_token", "Time from token to token", "model")
        self._duration = histogram("gen_ai_server_request_duration", "Time for a request", "model outcome")
        self._requests = counter("espalier_requests", "Requests ended, by outcome", "model api outcome")
        self._cancelled = counter("espalier_requests_cancelled", "Requests whose client left or cancelled", "model")
        self._tokens = counter("espalier_tokens", "Tokens of ended requests, by kind", "model kind")
        self._restarts = counter("espalier_child_restarts", "Restarts of children of the tree", "child")
        self._refusals = counter("espalier_refusals", "Requests and connections refused by the gateway", "code")
        self._dropped = counter("espalier_clients_dropped", "Clients that were disconnected, by reason", "reason")
        self._incomplete = counter(
            "espalier_responses_incomplete", "Complete responses that clients received in part", "api reason"
        )
        self._calls = counter("espalier_worker_calls", "Calls to workers, by outcome", "model worker outcome")
        self._ejections = counter(
            "espalier_worker_ejections", "Workers ejected, by the code of their last failure", "model worker code"
        )
        self._resumes = counter(
            "espalier_resumes", "Requests whose worker was lost, by what followed", "model code kind"
        )
        self._define_routing()
        self._define_encoding()
        self._abort_duration = histogram(
            "espalier_engine_abort_duration", "Time from a cancellation to the release of its slot", "engine"
        )
        self._grammar_checks = histogram(
            "espalier_grammar_check_duration", "Time to check a grammar, by outcome", "model outcome"
        )
        self._canaries = counter("espalier_canaries", "Canaries of idle engines, by outcome", "engine rank outcome")
        self._canary_times = histogram("espalier_canary", "Time for the whole answer to a canary", "engine rank")
        self._media_preparations = histogram(
            "espalier_media_preparation_duration",
            "Time to fetch and decode the images and videos of a request, by outcome",
            "model outcome",
        )
        self._stuck_slots = defaultdict(float)
        self.registry.add_gauge(
            "espalier_engine_slots_stuck", "Slots not released in time", "engine", self._stuck_slots.items
        )
        self.registry.add_counter("espalier_log_lost_bytes", "Bytes of a log dropped", "log", self._lost_bytes)
        self.registry.add_gauge("espalier_log_failing", "Whether a log cannot be written", "log", self._failing)

    def _define_routing(self) -> None:
        counter, histogram = self.registry.counter, self.registry.histogram
        self._choices = histogram("espalier_routing_decision", "Time to choose the workers of a request", "model")
        self._overlaps = counter(
            "espalier_routing_overlap_tokens", "Prompt tokens expected in prefix caches, and found there", "model kind"
        )
        self._predictions = counter(
            "espalier_routing_predictions", "Requests by whether that was found, or were routed blind", "model outcome"
        )

    def _define_encoding(self) -> None:
        counter, histogram = self.registry.counter, self.registry.histogram
        self._encodings = counter(
            "espalier_encoder_requests", "Requests for embeddings ended, by outcome", "engine modality outcome"
        )
        self._encoding_waits = histogram(
            "espalier_encoder_wait_duration", "Time of an item until its batch begins", "engine"
        )
        self._batches = histogram("espalier_encoder_batch_duration", "Time for a batch of items", "engine outcome")
        self._encoded_items = counter("espalier_encoder_items", "Items encoded", "engine modality")
        self._encoded_tokens = counter("espalier_encoder_tokens", "Tokens of the items encoded", "engine modality")
        self._encoder_queue = defaultdict(float)
        self.registry.add_gauge(
            *("espalier_encoder_queue_items", "Items that wait for a batch, or are in one", "engine state"),
            self._encoder_queue.items,
        )
        self._embedding_times = histogram(
            "espalier_embedder_request_duration", "Time of an embedder for a request, by outcome", "engine outcome"
        )
        self._embedded_items = counter("espalier_embedder_items", "Texts and pairs computed by embedders", "engine")
        self._embedded_tokens = counter("espalier_embedder_tokens", "Tokens of these texts and pairs", "engine")

    # Requests ----------------------------------------------------------------------------

    def first_token(self, model: str, seconds: float) -> None:
        """Count the time of a request until its first token."""
        self._first_token[model,].observe(seconds)

    def token_gaps(self, model: str) -> Buckets:
        """Return the histogram of a model's times between two tokens; a chunk's time is divided among its tokens."""
        return self._gap[model,]

    def request_ended(self, model: str, api: str, outcome: str, seconds: float, usage: Usage) -> None:
        """Count the end of a request; `outcome` is a finish reason, `left`, or an error's code."""
        self._requests[model, api, outcome] += 1
        if outcome == AskerLeft.code:
            self._cancelled[model,] += 1
        self._duration[model, outcome].observe(seconds)
        self._tokens[model, "input"] += usage.prompt_tokens
        self._tokens[model, "cached"] += usage.cached_tokens
        self._tokens[model, "output"] += usage.completion_tokens

    def refused(self, code: str) -> None:
        """Count a request or a connection refused before its admission."""
        self._refusals[code,] += 1

    def client_dropped(self, reason: str) -> None:
        """Count a dropped client, by the reason: `backlog`, `stalled`, `silent`, or `unauthenticated` to make room."""
        self._dropped[reason,] += 1

    def response_incomplete(self, api: str, reason: str) -> None:
        """Count a complete response received only in part: `backlog`, `stalled`, `silent`, `left` or `drain`."""
        self._incomplete[api, reason] += 1

    def grammar_checked(self, model: str, outcome: str, seconds: float) -> None:
        """Count the end of a grammar check: `accepted`, `refused`, `left`, or an error's code."""
        self._grammar_checks[model, outcome].observe(seconds)

    def media_prepared(self, model: str, outcome: str, seconds: float) -> None:
        """Count the preparation of a request's images and videos: `prepared`, `left`, or an error's code."""
        self._media_preparations[model, outcome].observe(seconds)

    # Engines, workers and children -------------------------------------------------------

    def child_restarted(self, path: str) -> None:
        """Count a restart of the child at `path`."""
        self._restarts[path,] += 1

    def aborted(self, engine: str, seconds: float) -> None:
        """Count the time from a request's cancellation to the release of its slot."""
        self._abort_duration[engine,].observe(seconds)

    def set_stuck_slots(self, engine: str, slots: int) -> None:
        """Set the number of an engine's slots not released after the end of their requests."""
        self._stuck_slots[engine,] = slots

    def canary_ended(self, engine: str, rank: str, outcome: str) -> None:
        """Count a canary of an engine: `answered`, `late`, `failed`, or `yielded` to a request."""
        self._canaries[engine, rank, outcome] += 1

    def canary_answered(self, engine: str, rank: str, seconds: float) -> None:
        """Count the time of an engine's whole answer to a canary."""
        self._canary_times[engine, rank].observe(seconds)

    def encoding_ended(self, engine: str, modality: str, outcome: str) -> None:
        """Count the end of a request to an encoder, with an outcome of its observer."""
        self._encodings[engine, modality, outcome] += 1

    def set_encoder_queue(self, engine: str, waiting: int, computing: int) -> None:
        """Set the numbers of an encoder's items waiting for a batch, and in the present batch."""
        self._encoder_queue[engine, "waiting"] = waiting
        self._encoder_queue[engine, "computing"] = computing

    def encoding_waited(self, engine: str, seconds: float) -> None:
        """Count the time of an item until its batch began."""
        self._encoding_waits[engine,].observe(seconds)

    def batch_encoded(self, engine: str, outcome: str, seconds: float) -> None:
        """Count the end of an encoder's batch."""
        self._batches[engine, outcome].observe(seconds)

    def item_encoded(self, engine: str, modality: str, tokens: int) -> None:
        """Count an item of a successful batch."""
        self._encoded_items[engine, modality] += 1
        self._encoded_tokens[engine, modality] += tokens

    def embedding_ended(self, engine: str, outcome: str, seconds: float, items: int, tokens: int) -> None:
        """Count the end of a request to an embedder, and the items that it has computed for it."""
        self._embedding_times[engine, outcome].observe(seconds)
        self._embedded_items[engine,] += items
        self._embedded_tokens[engine,] += tokens

    def worker_called(self, model: str, worker: str, outcome: str) -> None:
        """Count the end of a call to a worker: `ended`, `left`, or an error's code."""
        self._calls[model, worker, outcome] += 1

    def route_chosen(self, model: str, seconds: float) -> None:
        """Count the time of a choice of workers."""
        self._choices[model,].observe(seconds)

    def overlap_found(self, model: str, expected: int | None, found: int, blind: bool) -> None:
        """Count the prompt tokens of a request expected in a prefix cache by its router, and found there.

        None: its policy expects nothing. A choice was `blind` if the cache of some worker had not been reported yet.
        """
        self._overlaps[model, "found"] += found
        if expected is None:
            return
        self._overlaps[model, "expected"] += expected
        outcome = "blind" if blind else "equal" if found == expected else "more" if found > expected else "less"
        self._predictions[model, outcome] += 1

    def worker_ejected(self, model: str, worker: str, code: str) -> None:
        """Count an ejection of a worker or a pair; `code` is its last failure's."""
        self._ejections[model, worker, code] += 1

    def worker_lost(self, model: str, code: str, kind: str) -> None:
        """Count a loss of a request's worker: `resumed` elsewhere, `retried`, or `impossible` to continue."""
        self._resumes[model, code, kind] += 1

    def retain_nodes(self, nodes: Collection[str]) -> None:
        """Forget the counts of workers on all other nodes, so that labels stay bounded."""
        for counts in (self._calls, self._ejections):
            for labels in [labels for labels in counts if labels[1].partition("/")[0] not in nodes]:
                del counts[labels]

    # Text --------------------------------------------------------------------------------

    def render(self, loads: Mapping[str, EngineLoad], left_out: Mapping[str, int] = NOTHING) -> bytes:
        """Return all metrics in Prometheus's text format.

        `loads` are the engines' own counts, and `left_out` the numbers of series left out of their own metrics.
        """
        return b"".join(registry.render(self.families(loads, left_out)))

    async def render_in_steps(self, loads: Mapping[str, EngineLoad], left_out: Mapping[str, int] = NOTHING) -> bytes:
        """Return the same text, with a checkpoint after each piece."""
        return await registry.render_in_steps(self.families(loads, left_out))

    def families(self, loads: Mapping[str, EngineLoad], left_out: Mapping[str, int] = NOTHING) -> Iterator[Metric]:
        """Yield all present metric families, large ones in pieces."""
        yield from self.registry.families()
        for key, about in ENGINE_LOADS.items():
            samples = (((engine,), float(getattr(load, key))) for engine, load in loads.items())
            yield from pieces(GaugeMetricFamily, f"espalier_engine_{key}", about, "engine", samples)
        counts = (((engine,), float(series)) for engine, series in left_out.items())
        yield from pieces(
            *(GaugeMetricFamily, "espalier_engine_metrics_left_out", "Series of the engine's own that found no place"),
            *("engine", counts),
        )

    def _lost_bytes(self) -> Iterable[tuple[LabelValues, float]]:
        return [((name,), log.lost_bytes) for name, log in self.logs.items()]

    def _failing(self) -> Iterable[tuple[LabelValues, float]]:
        return [((name,), float(log.failing)) for name, log in self.logs.items()]
