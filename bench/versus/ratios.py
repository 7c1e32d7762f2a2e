"""Ratios of ours to a peer's, each of two loads that followed one another, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from attrs import frozen

from bench.cost.options import describe
from bench.cost.report import number
from bench.cost.sample import Load, Sample
from bench.rig.result import Cell, Table

NUMBER_WIDTH = 8

Figure = Callable[[Sample], float]

FIGURES: dict[str, Figure] = {
    "CPU us a token": lambda sample: 1e6 * sample.outside.cpu_s / sample.tokens,
    "CPU us a request": lambda sample: 1e6 * sample.outside.cpu_s / sample.requests,
    "waits a token": lambda sample: sample.outside.voluntary / sample.tokens,
    "preemptions a token": lambda sample: sample.outside.involuntary / sample.tokens,
    "tokens/s": lambda sample: sample.tokens_per_s,
    "first token p50 ms": lambda sample: sample.ttft_p50_ms,
    "first token p99 ms": lambda sample: sample.ttft_p99_ms,
    "gap p50 ms": lambda sample: sample.gap_p50_ms,
    "gap p99 ms": lambda sample: sample.gap_p99_ms,
    "memory MB": lambda sample: sample.outside.memory_mb,
    "peak MB": lambda sample: sample.outside.memory_max_mb,
}
NOTE = (
    "All but the engine's scheduler, which is the same in both. A ratio is ours over the peer's in one round, whose "
    "loads follow one another: only ratios can be compared between runs, since the machine differs from hour to hour."
)


@frozen
class Pair:
    """One round: the peer's sample, and ours right after it."""

    theirs: Sample
    ours: Sample

    def ratio(self, figure: Figure) -> float | None:
        """Return ours over the peer's, None where the peer's is 0."""
        theirs = figure(self.theirs)
        return figure(self.ours) / theirs if theirs else None


def by_loads(pairs: Sequence[Pair]) -> dict[tuple[Load, Load], list[Pair]]:
    """Return the pairs by the loads of the peer and of ours."""
    result: dict[tuple[Load, Load], list[Pair]] = {}
    for pair in pairs:
        result.setdefault((pair.theirs.load, pair.ours.load), []).append(pair)
    return result


def rows(pairs: Sequence[Pair]) -> list[list[Cell]]:
    """Return a row for each figure: all values of the peer's and of ours, and all ratios."""
    result: list[list[Cell]] = []
    for name, figure in FIGURES.items():
        ratios = [ratio for pair in pairs if (ratio := pair.ratio(figure)) is not None]
        result.append([name, [figure(each.theirs) for each in pairs], [figure(each.ours) for each in pairs], ratios])
    return result


def tables(theirs: str, ours: str, pairs: Sequence[Pair]) -> list[Table]:
    """Return a table for each two loads."""
    return [
        Table(title=heading(several[0]), columns=("", theirs, ours, "ratio"), rows=rows(several), note=NOTE)
        for several in by_loads(pairs).values()
    ]


def heading(pair: Pair) -> str:
    """Return the loads of a pair in words."""
    theirs, ours = pair.theirs.load.api, pair.ours.load.api
    return describe(pair.ours.load) if theirs == ours else f"{describe(pair.ours.load)} beside {theirs}"


def text(table: Table) -> str:
    """Return a table as text: medians of both, and of the ratios the least, the median and the most."""
    name_width = max(len(str(row[0])) for row in table.rows)
    widths = (*(max(len(name), NUMBER_WIDTH) for name in table.columns[1:3]), 9, 6, 6)
    heads = (*table.columns[1:3], "ratio min", "median", "max")
    lines = [heads, *map(_cells, table.rows)]
    names = ["", *(str(row[0]) for row in table.rows)]
    rows = (
        f"{name:<{name_width}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in zip(names, lines, strict=True)
    )
    return "\n".join((table.title, *rows))


def _cells(row: Sequence[Cell]) -> tuple[str, ...]:
    theirs, ours, ratios = (cell for cell in row if isinstance(cell, list))
    medians = (number(statistics.median(theirs)), number(statistics.median(ours)))
    if not ratios:
        return (*medians, "", "", "")
    return (*medians, *(f"{value:.2f}" for value in (min(ratios), statistics.median(ratios), max(ratios))))
