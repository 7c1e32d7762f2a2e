"""The summary of what was measured: a file of the repository, whose targets are a table of docs/performance.md."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.report.targets import TARGETS, Found, Target
from bench.rig.node import ROOT
from bench.rig.result import Result
from bench.rig.table_text import number

FILE = ROOT / "bench" / "results" / "summary.json"
PAGE = ROOT / "docs" / "performance.md"
FIRST, LAST = "<!-- targets: written by python -m bench report --keep -->", "<!-- end of targets -->"
COLUMNS = ("what", "the other", "ours", "ratio, or figure", "target", "")
NOTE = (
    "A ratio is ours over the other's in one round, whose loads follow one another; the median stands before the least "
    "and the greatest value, and decides whether a target is met; of a longest gap and a steepest rise, the worst does."
)

Row = dict[str, Any]


class Entry(msgspec.Struct, kw_only=True):
    """The rows that one command has measured; a list of three values is the median, the least and the greatest."""

    name: str
    date: str
    commit: str | None
    machine: str
    command: str
    rows: list[Row]


def entry(name: str, result: Result) -> Entry | None:
    """Return what a document has measured of its targets, None without any."""
    rows = [row(target, found) for target in TARGETS if target.result == name and (found := target.find(result)).values]
    machine, versions = result.machine, result.versions
    words = [f"{machine.get('cores')} cores", f"load {machine.get('load before')} before", machine.get("processor")]
    words += [f"{name} {versions[name]}" for name in ("python", "sglang") if versions.get(name)]
    if not rows:
        return None
    return Entry(
        name=name,
        date=result.begun_at[:10],
        commit=versions.get("commit"),
        machine=", ".join(str(word) for word in words if word),
        command=shlex.join(result.command),
        rows=rows,
    )


def row(target: Target, found: Found) -> Row:
    """Return one target with its values."""
    return {
        "what": target.what,
        "theirs": spread(found.theirs),
        "ours": spread(found.ours),
        "value": spread(found.values),
        "unit": target.unit,
        "target": target.wanted,
        "share": float(f"{target.share(found.values):.6g}"),
        "met": target.met(found.values),
    }


def spread(values: Sequence[float]) -> list[float]:
    """Return the median of values, the least and the greatest, with six digits that count; empty without values."""
    several = (statistics.median(values), min(values), max(values)) if values else ()
    return [float(f"{value:.6g}") for value in several]


def read() -> list[Entry]:
    """Read the summary."""
    return msgspec.json.decode(FILE.read_bytes(), type=list[Entry])


def text(entries: Sequence[Entry]) -> str:
    """Return the file's text, a line for each row."""
    parts = []
    for each in entries:
        head = msgspec.structs.asdict(each)
        rows = ",\n  ".join(msgspec.json.encode(row).decode() for row in head.pop("rows"))
        lines = [f'"{key}": {msgspec.json.encode(value).decode()},' for key, value in head.items()]
        parts.append("{" + "\n ".join(lines) + f'\n "rows": [\n  {rows}\n ]}}')
    return "[\n" + ",\n".join(parts) + "\n]\n"


def targets(entries: Sequence[Entry]) -> str:
    """Return the table of all targets that are among the rows, and where their figures come from, as Markdown."""
    measured = [each for each in entries if "target" in each.rows[0]]
    rows = [
        (row["what"], _spread(row["theirs"]), _spread(row["ours"]), _value(row), row["target"], _verdict(row))
        for each in measured
        for row in each.rows
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    origins = [
        f"- {each.name}: {each.date}, {each.machine}, commit {each.commit}: `{each.command}`" for each in measured
    ]
    return "\n".join([*lines, "", NOTE, "", *origins])


def _spread(values: Sequence[float], unit: str = "") -> str:
    if not values:
        return ""
    middle, least, most = map(number, values)
    return f"{middle}{unit}" if least == most else f"{middle}{unit} ({least} to {most})"


def _value(row: Mapping[str, Any]) -> str:
    unit: str = row["unit"]
    return _spread(row["value"], "" if unit.startswith(" x") else unit)  # a ratio names its peer in the target


def _verdict(row: Mapping[str, Any]) -> str:
    return "met" if row["met"] else f"{number(row['share'])} times the target"


def replaced(page: str, table: str) -> str:
    """Return a page with another table between its marks; raises `ValueError` without them."""
    before, begin, rest = page.partition(FIRST)
    _, end, after = rest.partition(LAST)
    if not begin or not end:
        raise ValueError(f"the page needs a line {FIRST} and behind it a line {LAST}")
    return f"{before}{FIRST}\n\n{table}\n\n{LAST}{after}"
