"""The page of one or several documents: HTML with its style and its drawings in it, which loads nothing else."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median

from bench.report import charts
from bench.report.scales import number
from bench.rig.result import PERCENTS, Cell, Curve, Distribution, Figure, Result, Table

STYLE = (Path(__file__).parent / "page.css").read_text()
COLUMNS_NARROW_MAX = 4  # a table with more of them takes the width of the page
SHOWN = {"min": 0.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
LOGARITHMIC_FROM = 8.0  # from such a ratio of the ends on, an axis of a sweep is logarithmic


def page(results: Sequence[Result], title: str) -> str:
    """Return the page of documents, each in a section of its own, behind the curves that they make together."""
    together = sweeps(results)
    sections = [_together(together)] if together else []
    sections += [_section(place, result) for place, result in enumerate(results)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{_contents(results)}"
        '<p class="soft">Where something was measured several times, its median stands with the least and the greatest '
        "value in small; in curves the band has them. Point at a dot for its value.</p>\n"
        f"{''.join(sections)}</body>\n</html>\n"
    )


def _contents(results: Sequence[Result]) -> str:
    if len(results) < 2:
        return ""
    items = (f'<li><a href="#result-{place}">{escape(each.title)}</a></li>' for place, each in enumerate(results))
    return f"<ul>{''.join(items)}</ul>\n"


def _section(place: int, result: Result) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items() if value is not None)
    versions = ", ".join(f"{name} {value}" for name, value in result.versions.items() if value is not None)
    notes = "".join(f'<p class="note">{escape(note)}</p>\n' for note in result.notes)
    return (
        f'<section id="result-{place}">\n<h2>{escape(result.title)}</h2>\n'
        f'<p class="soft">{escape(result.begun_at)} &middot; {escape(machine)} &middot; {escape(versions)}</p>\n'
        f"<details><summary>The command</summary><pre>{escape(shlex.join(result.command))}</pre></details>\n"
        f"{notes}{_figures(result.figures)}</section>\n"
    )


def _together(curves: Sequence[Curve]) -> str:
    return f"<section>\n<h2>Together</h2>\n{_figures(curves)}</section>\n"


def _figures(figures: Sequence[Figure]) -> str:
    return f'<div class="figures">\n{"".join(map(_figure, figures))}</div>\n'


def _figure(figure: Figure) -> str:
    match figure:
        case Table():
            body, wide = _table(figure.columns, figure.rows), len(figure.columns) > COLUMNS_NARROW_MAX
        case Distribution():
            body, wide = charts.key(figure.series) + charts.distribution(figure) + _percentiles(figure), False
        case Curve():
            body, wide = charts.key(figure.series) + charts.curve(figure), False
    note = f"<figcaption>{escape(figure.note)}</figcaption>" if figure.note else ""
    return f"<figure{' class=wide' * wide}>\n<h3>{escape(figure.title)}</h3>\n{body}{note}</figure>\n"


def _percentiles(figure: Distribution) -> str:
    rows: list[list[Cell]] = [
        [name or "all", *(values[PERCENTS.index(percent)] for percent in SHOWN.values())]
        for name, values in figure.series.items()
        if values
    ]
    return _table([figure.unit, *SHOWN], rows) if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    if not rows:
        return charts.NOTHING
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def _cell(cell: Cell) -> str:
    match cell:
        case None | []:
            return "<td>&ndash;</td>"
        case str():
            return f'<td class="text">{escape(cell)}</td>'
        case [only]:
            return f"<td>{number(only)}</td>"
        case list():
            return f"<td>{number(median(cell))}<small>{number(min(cell))} &ndash; {number(max(cell))}</small></td>"
        case _:
            return f"<td>{number(cell)}</td>"


def sweeps(results: Iterable[Result]) -> list[Curve]:
    """Return a curve of each measure for documents of one kind at several values; equal values are repetitions."""
    found: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.sweep is not None:
            found[result.schema, result.sweep.x].append(result)
    curves = []
    for (_, x), members in found.items():
        values = {each.sweep.value for each in members if each.sweep is not None}
        if len(values) > 1:
            wide = min(values) > 0 and max(values) / min(values) >= LOGARITHMIC_FROM
            curves += _sweep(x, members, logarithmic=wide)
    return curves


def _sweep(x: str, members: Iterable[Result], *, logarithmic: bool) -> list[Curve]:
    measured: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
    for sweep in (each.sweep for each in members):
        for name, (unit, value) in sweep.measures.items() if sweep is not None else ():
            if sweep is not None and value is not None:
                series = measured.setdefault((name, unit), {}).setdefault(sweep.series, {})
                series.setdefault(sweep.value, []).append(value)
    return [
        Curve(
            title=f"{name[:1].upper()}{name[1:]}",
            x=x,
            unit=unit,
            series={series: sorted(points.items()) for series, points in each.items()},
            logarithmic=logarithmic,
        )
        for (name, unit), each in measured.items()
    ]
