"""Prices over several loads: what a request costs by itself and each token of it, and the memory of a client."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from bench.cost.options import describe
from bench.cost.report import OUTSIDE
from bench.cost.sample import Sample
from bench.rig.result import Cell, Table

SPLIT_NOTE = (
    "From answers of two lengths, the shortest and the longest, each start by itself: the price of a request is a line "
    "over its tokens. A line is an approximation: longer answers also run beside more others at their ends."
)
MEMORY_NOTE = (
    "The growth of the peak of resident memory beyond that of the first load in the same start, over the clients that "
    "are more. A peak never falls, so that only loads with more clients than all before them show theirs."
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
    for sample, growths_kb in memory_growths(samples):
        for group, growth_kb in growths_kb.items():
            grown.setdefault((describe(sample.load), group), []).append(growth_kb)
    if not grown:
        return []
    rows: list[list[Cell]] = [[load, group, values] for (load, group), values in sorted(grown.items())]
    columns = ("", "processes of", "kB a client")
    return [Table(title=f"{title}: memory of a client", columns=columns, rows=rows, note=MEMORY_NOTE)]


def memory_growths(samples: Sequence[Sample]) -> Iterator[tuple[Sample, dict[str, float]]]:
    """Yield by how many kB a client the peak of each group's memory grew, for each load whose peak is its own."""
    for several in starts(samples):
        first, clients_max = several[0], several[0].load.clients
        for sample in several:
            if sample.load.clients <= clients_max:
                continue  # its peak may be that of a load before it
            clients_max = sample.load.clients
            more = clients_max - first.load.clients
            yield (
                sample,
                {
                    group: 1024 * (spent.memory_max_mb - first.groups[group].memory_max_mb) / more
                    for group, spent in sample.groups.items()
                    if group in first.groups
                },
            )


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
