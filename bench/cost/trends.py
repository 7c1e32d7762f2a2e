"""Prices over several loads: what a request costs by itself and each token of it, and the price over the clients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product

from bench.cost.options import describe
from bench.cost.report import OUTSIDE
from bench.cost.sample import Sample
from bench.rig.result import Cell, Curve, Table

SPLIT_NOTE = (
    "From answers of two lengths, the shortest and the longest, each start by itself: the price of a request is a line "
    "over its tokens. A line is an approximation: longer answers also run beside more others at their ends."
)
MEMORY_NOTE = (
    "The growth of the peak of resident memory beyond that of the load with the fewest clients in the same start, over "
    "the clients that are more. A peak never falls, so of the loads of a start the smallest comes first."
)


def price_us(sample: Sample) -> float:
    """Return the CPU time of a request outside the scheduler, in microseconds."""
    return 1e6 * sample.outside.cpu_s / sample.requests


def split_tables(title: str, samples: Sequence[Sample]) -> list[Table]:
    """Return the prices of a request and of a token by themselves, for each API; nothing for answers of one length."""
    rows: list[list[Cell]] = []
    kinds = dict.fromkeys((sample.load.api, sample.load.clients) for sample in samples)
    for api, clients in kinds:
        several = [each for each in samples if (each.load.api, each.load.clients) == (api, clients)]
        parts = [part for start in starts(several) if (part := split(start)) is not None]
        if parts:
            rows.append([f"{api}, {clients} clients", [part[0] for part in parts], [part[1] for part in parts]])
    columns = (OUTSIDE, "us a request by itself", "us a token by itself")
    if not rows:
        return []
    return [Table(title=f"{title}: a request and its tokens", columns=columns, rows=rows, note=SPLIT_NOTE)]


def memory_tables(title: str, samples: Sequence[Sample]) -> list[Table]:
    """Return by how much the peak of each group's memory grew with each further client; nothing for one number."""
    grown: dict[tuple[str, str], list[float]] = {}
    for several in starts(samples):
        fewest = min(several, key=lambda sample: sample.load.clients)
        for sample in several:
            if (more := sample.load.clients - fewest.load.clients) > 0:
                for group in sample.groups.keys() & fewest.groups.keys():
                    growth_mb = sample.groups[group].memory_max_mb - fewest.groups[group].memory_max_mb
                    grown.setdefault((describe(sample.load), group), []).append(1024 * growth_mb / more)
    if not grown:
        return []
    rows: list[list[Cell]] = [[load, group, values] for (load, group), values in sorted(grown.items())]
    columns = ("", "processes of", "kB a client")
    return [Table(title=f"{title}: memory of a client", columns=columns, rows=rows, note=MEMORY_NOTE)]


def starts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each start."""
    return [
        [each for each in samples if each.start == start] for start in dict.fromkeys(each.start for each in samples)
    ]


def split(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """Return the price of a request without tokens, and of a token; None for answers of one length."""
    lengths = sorted({sample.load.output_tokens for sample in samples})
    if len(lengths) < 2:
        return None
    short, long = (
        statistics.median(price_us(each) for each in samples if each.load.output_tokens == length)
        for length in (lengths[0], lengths[-1])
    )
    token = (long - short) / (lengths[-1] - lengths[0])
    return short - lengths[0] * token, token


def curves(title: str, samples: Sequence[Sample]) -> list[Curve]:
    """Return the price of a token over the number of clients, for each length of answers; nothing for one number."""
    result = []
    for length in dict.fromkeys(sample.load.output_tokens for sample in samples):
        several = [sample for sample in samples if sample.load.output_tokens == length]
        counts = sorted({sample.load.clients for sample in several})
        if len(counts) < 2:
            continue
        series: dict[str, list[tuple[float, list[float]]]] = {}
        for api, clients in product(dict.fromkeys(sample.load.api for sample in several), counts):
            loads = [each for each in several if (each.load.api, each.load.clients) == (api, clients)]
            if loads:
                values = [1e6 * each.outside.cpu_s / each.tokens for each in loads]
                series.setdefault(api, []).append((float(clients), values))
        result.append(
            Curve(
                title=f"{title}: CPU time of a token, {OUTSIDE}, answers of {length} tokens",
                x="clients",
                unit="us a token",
                series=series,
                logarithmic=True,
            )
        )
    return result
