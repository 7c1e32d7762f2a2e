"""The tables of targets and figures as Markdown, each between two marks of the page, and the plots beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.figures.kept import Kept, origin
from bench.figures.plots import plots
from bench.figures.routing_data import RoutingData
from bench.figures.routing_tables import tables
from bench.figures.targets import TARGETS, Found, Target
from bench.rig.node import ROOT
from bench.rig.table_text import number

TARGETS_NAME = "figures"
PLOTS = "plots"  # the folder of the plots beside the page
NOT_MEASURED = "not measured"
NOTE = (
    "A ratio is ours over the other's in one round, whose loads follow one another; the median stands before the least "
    "and the greatest value, and decides whether a target is met; of a longest gap and a steepest rise, the worst does."
)


class NoMarks(Exception):
    """A page lacks the marks between which its figures stand."""


def table(kept: Mapping[str, Kept], results: str) -> str:
    """Return the table of docs/performance.md: every target, with the figures of both sides."""
    lines = ["| what | the other | ours | ratio, or figure | target | |", "|---|---|---|---|---|---|"]
    for target, found in _found(kept):
        cells = (spread(found.theirs), spread(found.ours), spread(found.values, target.unit))
        lines.append(_row(target.what, *cells, target.wanted, verdict(target, found)))
    return "\n".join([*lines, "", NOTE, "", *_origins(kept, results)])


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return the median of values with the least and the greatest."""
    if not values:
        return ""
    middle, least, most = (number(value) for value in (statistics.median(values), min(values), max(values)))
    # A ratio names its peer in the target.
    unit = "" if unit.startswith(" x") else unit
    return f"{middle}{unit}" if least == most else f"{middle}{unit} ({least} to {most})"


def verdict(target: Target, found: Found) -> str:
    """Return whether a target is met, or by how much it is missed."""
    if not found.values:
        return NOT_MEASURED
    if target.met(found.values):
        return "met"
    limit = target.least if target.most is None else target.most
    assert limit is not None
    return f"**missed**: {number(target.decisive(found.values) / limit)} times the target"


def marks(name: str = TARGETS_NAME) -> tuple[str, str]:
    """Return the lines before and after the table of a name."""
    return f"<!-- {name}: written by python -m bench figures -->", f"<!-- end of {name} -->"


def replaced(text: str, figures: str, name: str = TARGETS_NAME) -> str:
    """Return a page with other figures between the marks of a name; raises `NoMarks`."""
    first, last = marks(name)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise NoMarks(f"the page needs a line {first} and behind it a line {last}")
    return f"{before}{first}\n\n{figures}\n\n{last}{after}"


def pages(kept: Mapping[str, Kept], root: Path = ROOT, routing: RoutingData | None = None) -> dict[Path, str]:
    """Return the pages and plots as they should be, by their files."""
    performance = root / "docs" / "performance.md"
    text = replaced(performance.read_text(), table(kept, "../bench/results"))
    routing = routing or RoutingData()
    for name, figures in tables(routing).items():
        text = replaced(text, figures, name)
    drawn = {performance.parent / PLOTS / name: plot for name, plot in plots(routing).items()}
    return {performance: text, **drawn}


def _found(kept: Mapping[str, Kept]) -> list[tuple[Target, Found]]:
    return [(each, each.find(kept[each.result]) if each.result in kept else Found(())) for each in TARGETS]


def _origins(kept: Mapping[str, Kept], results: str) -> list[str]:
    used = dict.fromkeys(target.result for target in TARGETS)
    return [f"- [{name}]({results}/{name}.json): {origin(kept[name])}" for name in used if name in kept]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
