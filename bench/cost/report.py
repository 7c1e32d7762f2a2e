"""The result of `python -m bench cost`: each group's price of a token and of a request, over all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.cost.accounts import Spent
from bench.cost.groups import APART
from bench.cost.options import describe
from bench.cost.sample import CLIENT_SHARE_MAX, Load, Sample
from bench.rig.result import Cell, Table

OUTSIDE, EVERYTHING = "outside the scheduler", "everything"

# Of a group in a sample: its column, and the value.
GroupFigure = Callable[[Spent, Sample], float]
GROUP_FIGURES: dict[str, GroupFigure] = {
    "processes": lambda spent, _: spent.processes,
    "us a token": lambda spent, sample: 1e6 * spent.cpu_s / sample.tokens,
    "user": lambda spent, sample: 1e6 * spent.user_s / sample.tokens,
    "system": lambda spent, sample: 1e6 * spent.system_s / sample.tokens,
    "us a request": lambda spent, sample: 1e6 * spent.cpu_s / sample.requests,
    "waits a token": lambda spent, sample: spent.voluntary / sample.tokens,
    "preemptions a token": lambda spent, sample: spent.involuntary / sample.tokens,
    "memory MB": lambda spent, _: spent.memory_mb,
    "peak MB": lambda spent, _: spent.memory_max_mb,
}
SEEN: dict[str, Callable[[Sample], float]] = {
    "tokens/s": lambda sample: sample.tokens_per_s,
    "requests/s": lambda sample: sample.requests_per_s,
    "first token p50 ms": lambda sample: sample.ttft_p50_ms,
    "first token p99 ms": lambda sample: sample.ttft_p99_ms,
    "gap p50 ms": lambda sample: sample.gap_p50_ms,  # rows of gaps are left out where answers have one token
    "gap p99 ms": lambda sample: sample.gap_p99_ms,
    "gap max ms": lambda sample: sample.gap_max_ms,
    "events a token": lambda sample: sample.events_per_token,
}
NOTE = (
    "CPU time of all processes of a group between the first request and the last answer's end, over the tokens (of the "
    "server's usage) or the requests; a token's price contains its share of the request. Waits and preemptions: "
    "voluntary and involuntary context switches. Memory: shared pages divided among those that share them, at the end "
    "of the load; peak: of resident memory since the start, shared pages in each."
)


def by_load(samples: Sequence[Sample]) -> dict[Load, list[Sample]]:
    """Return the samples of each load."""
    result: dict[Load, list[Sample]] = {}
    for sample in samples:
        result.setdefault(sample.load, []).append(sample)
    return result


def groups_of(samples: Sequence[Sample]) -> dict[str, list[tuple[Spent, Sample]]]:
    """Return what each group spent in each sample: the scheduler last of the groups, then the sums."""
    names = sorted({name for sample in samples for name in sample.groups}, key=lambda name: (name == APART, name))
    rows = {name: [(sample.groups[name], sample) for sample in samples if name in sample.groups] for name in names}
    if APART in names:
        rows[OUTSIDE] = [(sample.outside, sample) for sample in samples]
    rows[EVERYTHING] = [(sample.everything, sample) for sample in samples]
    return rows


def tables(title: str, samples: Sequence[Sample]) -> list[Table]:
    """Return two tables for each load: the price of each group, and what its clients saw; each cell has all values."""
    result = []
    for load, several in by_load(samples).items():
        rows: list[list[Cell]] = [
            [name, *([figure(spent, sample) for spent, sample in pairs] for figure in GROUP_FIGURES.values())]
            for name, pairs in groups_of(several).items()
        ]
        head = f"{title}: {describe(load)}"
        result.append(Table(title=head, columns=("processes of", *GROUP_FIGURES), rows=rows, note=NOTE))
        seen: list[list[Cell]] = [
            [name, [figure(each) for each in several]]
            for name, figure in SEEN.items()
            if load.has_gaps or not name.startswith("gap")
        ]
        result.append(Table(title=f"{head}: the clients", columns=("", "value"), rows=seen))
    return result


def warnings(samples: Sequence[Sample]) -> list[str]:
    """Return what a reader of the figures must know."""
    lines = []
    if (share := max(sample.client_share for sample in samples)) > CLIENT_SHARE_MAX:
        lines.append(f"SATURATED: a process of the load used {share:.0%} of a core; take more --processes")
    if ended := sum(sample.ended for sample in samples):
        lines.append(f"{ended} processes of the server ended during a load: what they spent is not counted")
    if other := sum(sample.tokens != sample.requests * sample.load.output_tokens for sample in samples):
        lines.append(f"OTHER LENGTHS: in {other} of {len(samples)} loads answers were shorter or longer than asked for")
    if (starts := len({sample.start for sample in samples})) < 3:
        lines.append(f"starts: {starts}; a server differs from start to start, so take three or more for a figure")
    return lines
