"""Ratios of ours to a peer's, each of two loads that followed one another, and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from bench.cost.options import describe
from bench.cost.report import SEEN
from bench.cost.sample import Load, Sample
from bench.rig.result import Cell, Table

Figure = Callable[[Sample], float]

FIGURES: dict[str, Figure] = {
    "CPU us a token": lambda sample: 1e6 * sample.outside.cpu_s / sample.tokens,
    "CPU us a request": lambda sample: 1e6 * sample.outside.cpu_s / sample.requests,
    "waits a token": lambda sample: sample.outside.voluntary / sample.tokens,
    "preemptions a token": lambda sample: sample.outside.involuntary / sample.tokens,
    **{name: SEEN[name] for name in SEEN if name not in {"requests/s", "events a token"}},
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
        if name.startswith("gap") and not pairs[0].ours.load.has_gaps:
            continue
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
