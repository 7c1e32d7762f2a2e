"""Tables as text."""

from __future__ import annotations

from bench.rig.result import Cell, Table
from bench.rig.table_text import table_text


def test_a_table_has_aligned_columns_and_medians_of_repeated_values() -> None:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("long name", 1234.5, [0.1, 0.3, 0.2]),
        ("b", None, [2.0, 2.0]),
        ("c", "none", []),
    )
    text = table_text(Table(title="T", columns=("", "x", "s"), rows=rows, note="N"))
    assert text.splitlines() == [
        "T",
        "           x      s",
        "long name  1,234  0.2 (0.1 to 0.3)",
        "b          -      2",
        "c          none   -",
        "N",
    ]
