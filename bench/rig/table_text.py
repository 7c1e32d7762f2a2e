"""A table of a result as text, for a terminal."""

from __future__ import annotations

import statistics

from bench.rig.result import Cell, Table


def table_text(table: Table) -> str:
    """Return a table in columns as wide as their cells, with its title above it and its note below."""
    rows = [list(table.columns), *([_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join((table.title, *lines, *([table.note] if table.note else ())))


def _cell(cell: Cell) -> str:
    match cell:
        case None | []:
            return "-"
        case str():
            return cell
        case list() if len({*cell}) > 1:
            return f"{_number(statistics.median(cell))} ({_number(min(cell))} to {_number(max(cell))})"
        case list():
            return _number(cell[0])
        case _:
            return _number(cell)


def _number(value: float) -> str:
    """Return a number with about three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
