"""A registry of metrics, and their text in Prometheus's format.

Two needs made this more than `prometheus_client`'s own registry. Work for each token must cost next to nothing, so hot
paths add to plain dictionaries, and metric families are made only at a scrape. And a cluster of a thousand nodes has a
megabyte of metrics, whose rendering would block the event loop: so a large family is written in pieces, each in a step
of its own.

A name is defined once: a second definition is a `ValueError`, because it would silently hide the first one from every
dashboard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import trio
from attrs import define, field, frozen
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

SAMPLES_PER_PIECE = 100  # written in about half a millisecond

T = TypeVar("T")
LabelValues: TypeAlias = tuple[str, ...]
Samples: TypeAlias = Iterable[tuple[LabelValues, float]]
Counter: TypeAlias = defaultdict[LabelValues, float]
"""The values of a counter or gauge by their label values; a hot path adds to it directly."""


@define(eq=False)
class Buckets:
    """A histogram of durations: their counts by the buckets of `SECONDS`, and their sum."""

    counts: list[int] = field(factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration `times` times."""
        self.counts[bisect_left(SECONDS, seconds)] += times
        self.total_s += seconds * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the number of durations up to each bucket's limit, Prometheus's form of a histogram."""
        total, buckets = 0, []
        for limit, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((limit, float(total)))
        return buckets


Histogram: TypeAlias = defaultdict[LabelValues, Buckets]


@define(eq=False)
class Registry:
    """The metrics of a process: each name once, with a function that reads its samples at a scrape."""

    _families: dict[str, Callable[[], Iterator[Metric]]] = field(factory=dict)  # in the order of their text

    def counter(self, name: str, about: str, labels: str) -> Counter:
        """Define a counter for additions in place; `labels` are names separated by spaces."""
        values: Counter = defaultdict(float)
        self.add_counter(name, about, labels, values.items)
        return values

    def histogram(self, name: str, about: str, labels: str) -> Histogram:
        """Define a histogram of durations for additions in place; its name gets the suffix `_seconds`."""
        values: Histogram = defaultdict(Buckets)
        name = f"{name}_seconds"
        self._add(name, partial(_histogram_pieces, name, about, labels, values))
        return values

    def add_counter(self, name: str, about: str, labels: str, read: Callable[[], Samples]) -> None:
        """Define a counter with samples read at each scrape; its text gets the suffix `_total`."""
        self._add(name, lambda: pieces(CounterMetricFamily, name, about, labels, read()))

    def add_gauge(self, name: str, about: str, labels: str, read: Callable[[], Samples]) -> None:
        """Define a gauge with samples read at each scrape."""
        self._add(name, lambda: pieces(GaugeMetricFamily, name, about, labels, read()))

    def add_value(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Define a gauge without labels."""
        self.add_gauge(name, about, "", lambda: (((), read()),))

    def families(self) -> Iterator[Metric]:
        """Yield the present metric families, large ones in pieces."""
        for family in tuple(self._families.values()):
            yield from family()

    def _add(self, name: str, family: Callable[[], Iterator[Metric]]) -> None:
        if name in self._families:
            raise ValueError(f"the metric {name} is defined twice")
        self._families[name] = family


def render(families: Iterable[Metric]) -> Iterator[bytes]:
    """Yield the text of each piece of each family, with or without the counts of the meantime."""
    previous = None
    for family in families:
        text = generate_latest(_Piece(family))
        # Only the first piece of a family has the lines of help and type.
        yield text if family.name != previous else text.split(b"\n", 2)[2]
        previous = family.name


async def render_in_steps(families: Iterable[Metric]) -> bytes:
    """Return the text of all families, with a checkpoint after each piece."""
    texts = []
    for text in render(families):
        texts.append(text)
        await trio.lowlevel.checkpoint()
    return b"".join(texts)


def pieces(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, about: str, labels: str, samples: Samples
) -> Iterator[Metric]:
    """Yield a family in pieces, with all samples read in one step; one piece if there are no samples."""
    for part in _in_pieces(samples, SAMPLES_PER_PIECE):
        family = kind(name, about, labels=labels.split())
        for values, value in part:
            family.add_metric(values, value)
        yield family


def _histogram_pieces(
    name: str, about: str, labels: str, histograms: Mapping[LabelValues, Buckets]
) -> Iterator[Metric]:
    for part in _in_pieces(histograms.items(), SAMPLES_PER_PIECE // len(SECONDS)):
        family = HistogramMetricFamily(name, about, labels=labels.split())
        for values, buckets in part:
            family.add_metric(values, buckets.cumulative(), buckets.total_s)
        yield family


def _in_pieces(values: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the present values, `size` at a time; one empty piece if there are none."""
    now = tuple(values)
    yield now[:size]
    for start in range(size, len(now), size):
        yield now[start : start + size]


@frozen(eq=False)
class _Piece(Collector):
    """A part of one family, in the form that `generate_latest` accepts."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family
