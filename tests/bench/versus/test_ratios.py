"""Ratios are of two loads that followed one another, and their least, median and most are printed."""

from __future__ import annotations

import pytest

from bench.cost.sample import Load, Sample
from bench.versus import ratios
from bench.versus.ratios import FIGURES, Pair
from tests.bench.cost.samples import sample, spent

COST = FIGURES["CPU us a token"]
WS = Load(api="responses-ws")


def costing(seconds: float, load: Load | None = None) -> Sample:
    return sample(load, tokens=1000, groups={"node": spent(seconds), "scheduler": spent(50.0)})


def pairs() -> list[Pair]:
    """Return rounds in a machine that becomes twice as slow: the ratios do not."""
    return [Pair(costing(theirs), costing(ours)) for theirs, ours in ((0.1, 0.05), (0.2, 0.08), (0.2, 0.12))]


def test_a_ratio_to_nothing_is_none() -> None:
    assert Pair(costing(0.0), costing(0.1)).ratio(COST) is None


def test_a_row_has_every_value_and_every_ratio() -> None:
    row = next(row for row in ratios.rows(pairs()) if row[0] == "CPU us a token")
    assert row[1] == pytest.approx([100, 200, 200])
    assert row[2] == pytest.approx([50, 80, 120])
    assert row[3] == pytest.approx([0.5, 0.4, 0.6])


def test_loads_by_different_apis_have_tables_of_their_own() -> None:
    several = [Pair(costing(0.1), costing(0.1)), Pair(costing(0.1), costing(0.2, WS))]
    chat, websocket = ratios.tables("Theirs", "Ours", several)
    assert chat.title == "64 clients, 128 tokens, chat"
    assert websocket.title == "64 clients, 128 tokens, responses-ws beside chat"


def test_answers_of_one_token_have_no_gaps() -> None:
    single = Load(output_tokens=1)
    (table,) = ratios.tables("Theirs", "Ours", [Pair(costing(0.1, single), costing(0.1, single))])
    assert [row[0] for row in table.rows] == [name for name in FIGURES if "gap" not in name]
