"""The figures of a round are those of its answers."""

from __future__ import annotations

from array import array

from bench.load.messages import Record
from bench.routing.rounds import Figures


def test_a_round_adds_a_value_to_each_figure() -> None:
    figures = Figures()
    stamps = array("d", [0.02, 0.03]).tobytes()
    figures.add([Record(number=0, sent_s=0.0, ended_s=0.5, stamps=stamps, output_tokens=2)], cached=30, prompts=40)
    assert figures.cells()[:4] == [[75.0], [20.0], [20.0], [4.0]]
    assert figures.words() == "75.0 % cached, TTFT p50 20 ms, p99 20 ms, 4 tokens/s"
