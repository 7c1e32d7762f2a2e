"""The verdict on an attack: gaps are compared with the engine's own, and a lost answer always counts."""

from __future__ import annotations

from typing import Any

import pytest

from bench.faults.attacks import Verdict


def noted(during: list[Any], *, lost: tuple[()] | list[Any] = ()) -> dict[Any, Any]:
    gaps = [(0.0, 0.05), (1.0, 0.06), (2.0, 0.05), *((10.0 + at, gap) for at, gap in enumerate(during))]
    return {"gaps": gaps, "firsts": [(1.0, 9.0), (11.0, 0.2)], "lost": list(lost), "whole": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("found", "held"),
    [
        (noted([0.05, 0.29]), True),
        (noted([0.05, 0.31]), False),  # the engine's own is 50 ms
        (noted([0.05], lost=["link_lost"]), False),
        (noted([]), False),  # nothing came at all
    ],
)
def test_a_long_gap_or_a_lost_answer_fails_the_verdict(found: dict[str, Any], held: bool) -> None:
    verdict = Verdict()
    verdict.judge(found, 10.0)
    assert verdict.held is held
    assert (verdict.own_gap_ms, verdict.worst_first_ms, verdict.whole) == (50.0, 200.0, 3)
