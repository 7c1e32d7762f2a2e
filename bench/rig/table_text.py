"""A table of a result as text, for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.rig.result import Cell, Table

NOTHING = "-"


def table_text(table: Table) -> str:
    """Return a table without its note: of repeated values the median, and below it the least and the most.

    Columns of numbers are aligned at the right, the others at the left.
    """
    lines = [list(table.columns)]
    for row in table.rows:
        lines.append([_upper(cell) for cell in row])
        if any(below := [_span(cell) for cell in row]):
            lines.append(below)
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    texts = [any(isinstance(row[place], str) for row in table.rows) for place in range(len(columns))]
    padded = ("  ".join(map(_padded, line, widths, texts)).rstrip() for line in lines)
    return "\n".join((table.title, *padded))


def _padded(cell: str, width: int, is_text: bool) -> str:
    return cell.ljust(width) if is_text else cell.rjust(width)


def _upper(cell: Cell) -> str:
    match cell:
        case None | []:
            return NOTHING
        case str():
            return cell
        case list():
            return number(statistics.median(cell))
        case _:
            return number(cell)


def _span(cell: Cell) -> str:
    if not isinstance(cell, list) or not cell:
        return ""
    least, most = number(min(cell)), number(max(cell))
    return "" if least == most else f"{least}-{most}"


def number(value: float) -> str:
    """Return a number with two or three significant digits, and thousands as they are."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"


def tables_text(tables: Sequence[Table]) -> str:
    """Return tables, an empty line between two of them."""
    return "\n\n".join(map(table_text, tables))
