"""Tables as text."""

from __future__ import annotations

import pytest

from bench.rig.result import Cell, Table
from bench.rig.table_text import number, table_text

ROWS: tuple[tuple[Cell, ...], ...] = (
    ("long name", 1234.5, [0.1, 0.3, 0.2], "yes"),
    ("b", None, [2.0, 2.0], ""),
    ("c", 7.0, [], "no"),
)
TABLE = Table(title="T", columns=("", "x", "s", "?"), rows=ROWS, note="N")


def test_a_table_has_aligned_columns_and_of_repeated_values_the_median_and_the_extremes() -> None:
    assert table_text(TABLE).splitlines() == [
        "T",
        "               x          s  ?",
        "long name  1,234       0.20  yes",
        "                  0.10-0.30",
        "b              -          2",
        "c              7          -  no",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (99.94, "99.9"), (3.14159, "3.14"), (2.0, "2"), (0.00412, "0.0041"), (0.0, "0")],
)
def test_a_number_is_short(value: float, text: str) -> None:
    assert number(value) == text
