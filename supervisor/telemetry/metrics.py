"""What `/metrics` says, in Prometheus's text; names after OpenTelemetry's GenAI conventions and SGLang's habits.

What happens once a token is counted in plain lists here and turned into metric families only when somebody asks. A
cluster of a thousand nodes has a megabyte of them: they come in pieces, and each is written in a turn of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import trio
from attrs import define, field, frozen
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.engines.slots import SlotObserver
from actors.routing.ports import RoutingObserver
from protocol.errors import AskerLeft
from protocol.messages import EngineLoad, Usage
from supervisor.threads.queued_writer import QueuedWriter

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

SAMPLES_A_PIECE = 100  # about half a millisecond

Labels = tuple[str, ...]
T = TypeVar("T")


@define(eq=False)
class _Histogram:
    counts: list[int] = field(factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += times
        self.total += seconds * times

    def family(self) -> tuple[list[tuple[str, float]], float]:
        seen, buckets = 0, []
        for limit, count in zip((*(str(limit) for limit in SECONDS), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((limit, float(seen)))
        return buckets, self.total


def _histograms() -> defaultdict[Labels, _Histogram]:
    return defaultdict(_Histogram)


def _counters() -> defaultdict[Labels, float]:
    return defaultdict(float)


@define(eq=False)
class Metrics:
    """Counts what doors, routers and tree tell it; `gauges` and `sources` say what to read anew at every scrape."""

    gauges: dict[str, tuple[str, Callable[[], Mapping[str, float]]]] = field(factory=dict)
    sources: list[Callable[[], Iterable[Metric]]] = field(factory=list)
    logs: dict[str, QueuedWriter] = field(factory=dict)  # of the node and of each process that it keeps, by name
    _first_token: defaultdict[Labels, _Histogram] = field(factory=_histograms)
    _gap: defaultdict[Labels, _Histogram] = field(factory=_histograms)
    _duration: defaultdict[Labels, _Histogram] = field(factory=_histograms)
    _requests: defaultdict[Labels, float] = field(factory=_counters)
    _aborts: defaultdict[Labels, float] = field(factory=_counters)
    _tokens: defaultdict[Labels, float] = field(factory=_counters)
    _restarts: defaultdict[Labels, float] = field(factory=_counters)
    _refused: defaultdict[Labels, float] = field(factory=_counters)
    _dropped: defaultdict[Labels, float] = field(factory=_counters)
    _cut: defaultdict[Labels, float] = field(factory=_counters)
    _calls: defaultdict[Labels, float] = field(factory=_counters)
    _resumes: defaultdict[Labels, float] = field(factory=_counters)
    _ejections: defaultdict[Labels, float] = field(factory=_counters)
    _stuck: defaultdict[Labels, float] = field(factory=_counters)
    _to_abort: defaultdict[Labels, _Histogram] = field(factory=_histograms)
    _grammars: defaultdict[Labels, _Histogram] = field(factory=_histograms)

    def first_token(self, model: str, seconds: float) -> None:
        """Note how long a request waited for its first token."""
        self._first_token[model,].observe(seconds)

    def token_gap(self, model: str, seconds: float, tokens: int) -> None:
        """Note the time since the piece before, shared by the tokens of this one."""
        if tokens:
            self._gap[model,].observe(seconds / tokens, tokens)

    def request_ended(self, model: str, door: str, outcome: str, seconds: float, usage: Usage) -> None:
        """Note how a request ended: a finish reason, `left`, or an error's code."""
        self._requests[model, door, outcome] += 1
        if outcome == AskerLeft.code:
            self._aborts[model,] += 1
        self._duration[model, outcome].observe(seconds)
        self._tokens[model, "input"] += usage.prompt_tokens
        self._tokens[model, "cached"] += usage.cached_tokens
        self._tokens[model, "output"] += usage.completion_tokens

    def restarted(self, path: str) -> None:
        """Note that a child of the tree is started again."""
        self._restarts[path,] += 1

    def refused(self, code: str) -> None:
        """Note that a request, or a whole connection, was refused with this code before anybody was asked."""
        self._refused[code,] += 1

    def client_dropped(self, reason: str) -> None:
        """Note that a client was dropped: its `backlog` was full, it `stalled`, or it made room as a `stranger`."""
        self._dropped[reason,] += 1

    def answer_cut(self, door: str, reason: str) -> None:
        """Note an answer of which its client did not get all: `backlog`, `stalled`, `left` or `drain`."""
        self._cut[door, reason] += 1

    def aborted(self, engine: str, seconds: float) -> None:
        """Note how long a slot of this engine was kept after its asker had left."""
        self._to_abort[engine,].observe(seconds)

    def decode(self, engine: str) -> SlotObserver:
        """Return what counts what becomes of an engine's slots."""
        return _Slots(self, engine)

    def slots_stuck(self, engine: str, slots: int) -> None:
        """Note how many slots of this engine are set aside: their requests have ended, and it has not freed them."""
        self._stuck[engine,] = slots

    def grammar_checked(self, model: str, outcome: str, seconds: float) -> None:
        """Note how the check of a grammar ended: `accepted`, `refused`, `left`, or an error's code."""
        self._grammars[model, outcome].observe(seconds)

    def router(self, model: str) -> RoutingObserver:
        """Return what counts what becomes of a model's requests."""
        return _Routed(model, self._calls, self._resumes, self._ejections)

    def keep(self, nodes: Collection[str]) -> None:
        """Forget how calls ended whose workers are on other nodes than these."""
        for counts in (self._calls, self._ejections):
            for labels in [labels for labels in counts if labels[1].partition("/")[0] not in nodes]:
                del counts[labels]

    def text(self, loads: Mapping[str, EngineLoad]) -> bytes:
        """Return everything in Prometheus's text format; `loads` is each engine's own count."""
        return b"".join(self.pieces(loads))

    async def render_in_steps(self, loads: Mapping[str, EngineLoad]) -> bytes:
        """Return the same, and let others run between any two pieces."""
        written = []
        for piece in self.pieces(loads):
            written.append(piece)
            await trio.lowlevel.checkpoint()
        return b"".join(written)

    def pieces(self, loads: Mapping[str, EngineLoad]) -> Iterator[bytes]:
        """Yield the text of each piece of a family; what is counted meanwhile may be in it or not."""
        before = None
        for family in self.families(loads):
            text = generate_latest(_Piece(family))
            # Whatever follows the first piece of a family has no lines of help and type of its own.
            yield text if family.name != before else text.split(b"\n", 2)[2]
            before = family.name

    def families(self, loads: Mapping[str, EngineLoad]) -> Iterator[Metric]:
        """Yield the metric families as they are now; those with many samples in pieces."""
        gauges = partial(pieces, GaugeMetricFamily)
        for family in (
            _histogram_family(
                "gen_ai_server_time_to_first_token", "Time to the first token", "model", self._first_token
            ),
            _histogram_family("gen_ai_server_time_per_output_token", "Time from token to token", "model", self._gap),
            _histogram_family("gen_ai_server_request_duration", "Time for a request", "model outcome", self._duration),
            _counter_family("espalier_requests", "Requests ended, by how", "model door outcome", self._requests),
            _counter_family(
                "espalier_requests_cancelled", "Requests whose client left or cancelled", "model", self._aborts
            ),
            _counter_family("espalier_tokens", "Tokens of ended requests, by kind", "model kind", self._tokens),
            _counter_family("espalier_child_restarts", "Children of the tree started again", "child", self._restarts),
            _counter_family("espalier_refusals", "Requests and connections refused at the door", "code", self._refused),
            _counter_family("espalier_clients_dropped", "Clients that were dropped, by why", "reason", self._dropped),
            _counter_family(
                "espalier_responses_incomplete", "Whole answers that clients got in part", "door reason", self._cut
            ),
            _counter_family(
                "espalier_worker_calls", "Answers of workers, by how each ended", "model worker outcome", self._calls
            ),
            _counter_family(
                "espalier_worker_ejections",
                "Workers set aside, by what they failed",
                "model worker code",
                self._ejections,
            ),
            _counter_family("espalier_resumes", "Requests that went on elsewhere", "model code kind", self._resumes),
            _histogram_family(
                "espalier_engine_abort_duration",
                "Time from an asker's leaving to its slot's release",
                "engine",
                self._to_abort,
            ),
            _histogram_family(
                "espalier_grammar_check_duration",
                "Time to check a grammar, by verdict",
                "model verdict",
                self._grammars,
            ),
            gauges("espalier_engine_slots_stuck", "Slots not freed in time", "engine", self._stuck.items()),
        ):
            yield from family
        yield from _logs(self.logs)
        for source in tuple(self.sources):
            yield from source()
        for name, (about, read) in tuple(self.gauges.items()):
            yield from gauges(name, about, "of", (((of,), value) for of, value in read().items()))
        for name, about in (
            ("running", "Requests inside the engine, by its own count"),
            ("waiting", "Requests that wait inside the engine, by its own count"),
            ("kv_tokens_used", "KV memory that running requests hold, in tokens, by the engine's own count"),
        ):
            own = (((engine,), float(getattr(load, name))) for engine, load in loads.items())
            yield from gauges(f"espalier_engine_{name}", about, "engine", own)


@define(eq=False)
class _Slots(SlotObserver):
    """Counts what a decode tells of one engine's slots."""

    metrics: Metrics
    engine: str

    def aborted(self, seconds: float) -> None:
        self.metrics.aborted(self.engine, seconds)

    def stuck(self, slots: int) -> None:
        self.metrics.slots_stuck(self.engine, slots)


@frozen
class _Routed(RoutingObserver):
    """Counts what a router tells of one model's requests."""

    model: str
    calls: defaultdict[Labels, float]
    resumes: defaultdict[Labels, float]
    ejections: defaultdict[Labels, float]

    def call_ended(self, worker: str, outcome: str) -> None:
        self.calls[self.model, worker, outcome] += 1

    def call_resumed(self, code: str, sent: int) -> None:
        self.resumes[self.model, code, "resumed" if sent else "retried"] += 1

    def call_not_resumed(self, code: str) -> None:
        self.resumes[self.model, code, "impossible"] += 1

    def worker_ejected(self, worker: str, code: str) -> None:
        self.ejections[self.model, worker, code] += 1


def _logs(logs: Mapping[str, QueuedWriter]) -> Iterator[Metric]:
    lost = CounterMetricFamily("espalier_log_lost_bytes", "Bytes of a log that nobody took in time", labels=("log",))
    failing = GaugeMetricFamily("espalier_log_failing", "Whether a log cannot be written", labels=("log",))
    for name, log in logs.items():
        lost.add_metric((name,), log.lost_bytes)
        failing.add_metric((name,), float(log.failing))
    yield from (lost, failing)


def pieces(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    about: str,
    labels: str,
    values: Iterable[tuple[Labels, float]],
) -> Iterator[Metric]:
    """Yield a family in pieces; its values are looked up in one turn, and one piece is there if it has none."""
    for some in _in_pieces(values, SAMPLES_A_PIECE):
        family = kind(name, about, labels=labels.split())
        for of, value in some:
            family.add_metric(of, value)
        yield family


def _counter_family(name: str, about: str, labels: str, counters: Mapping[Labels, float]) -> Iterator[Metric]:
    return pieces(CounterMetricFamily, name, about, labels, counters.items())


def _histogram_family(name: str, about: str, labels: str, histograms: Mapping[Labels, _Histogram]) -> Iterator[Metric]:
    for some in _in_pieces(histograms.items(), SAMPLES_A_PIECE // len(SECONDS)):
        family = HistogramMetricFamily(f"{name}_seconds", about, labels=labels.split())
        for values, histogram in some:
            buckets, total = histogram.family()
            family.add_metric(values, buckets, total)
        yield family


def _in_pieces(values: Iterable[T], most: int) -> Iterator[Sequence[T]]:
    """Yield the values as they are now, so many at a time; once nothing, if there are none."""
    now = tuple(values)
    yield now[:most]
    for start in range(most, len(now), most):
        yield now[start : start + most]


@frozen(eq=False)
class _Piece(Collector):
    """A part of one family, for the library that writes it."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family
