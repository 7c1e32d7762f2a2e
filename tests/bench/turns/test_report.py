"""The tables of sessions: groups of turns, a peer beside ours, and the memory of a session."""

from __future__ import annotations

import pytest
from attrs import evolve

from bench.turns import report
from bench.turns.driving import Load
from tests.bench.turns.samples import sample, turn

LOAD = Load(tokens=1000, turns=2)


def test_turns_are_in_groups_by_their_numbers() -> None:
    assert {name: (each[0], each[-1]) for name, each in report.groups(35).items()} == {
        "1, cold": (1, 1),
        "2-9": (2, 9),
        "10-19": (10, 19),
        "20-29": (20, 29),
        "30-35": (30, 35),
    }
    assert list(report.groups(10)) == ["1, cold", "2-9", "10"]
    assert list(report.groups(3)) == ["1, cold", "2-3"]
    assert list(report.groups(2)) == ["1, cold", "2"]
    assert list(report.groups(1)) == ["1, cold"]


def test_a_table_has_all_values_of_a_group_over_all_rounds() -> None:
    samples = [sample(LOAD, 0.2, 0.02, 0.03), sample(LOAD, 0.3, 0.04, 0.05, round_number=1)]
    table, _ = report.tables("ours", samples)
    place = table.columns.index("gateway CPU ms")
    assert [[row[0], row[place]] for row in table.rows] == [
        ["1, cold", pytest.approx([200, 300])],
        ["2-3", pytest.approx([20, 30, 40, 50])],
    ]


def test_reuse_is_a_share_of_the_prompt_or_nothing() -> None:
    engine, kept = report.FIGURES["reused by the engine"], report.FIGURES["not encoded anew"]
    several = evolve(turn(4), prompt_tokens=[100, 300], cached_tokens=[0, 100], kept_share=0.75)
    assert (engine(several), kept(several)) == (0.25, 0.75)
    assert (engine(turn(4)), kept(turn(4))) == (None, None)


def test_the_memory_of_a_session_leaves_out_the_engine() -> None:
    *_, memory = report.tables("ours", [sample(evolve(LOAD, clients=2), 0.2)])
    assert memory.rows == [[report.heading(evolve(LOAD, clients=2)), [4096.0]]]


def test_a_ratio_is_of_the_medians_of_one_round() -> None:
    theirs = [sample(LOAD, 0.1, 0.01, 0.03), sample(LOAD, 0.1, 0.04, 0.04)]
    ours = [sample(LOAD, 0.2, 0.01, 0.01), sample(LOAD, 0.1, 0.01, 0.03)]
    (table,) = report.ratio_tables("theirs", "ours", list(zip(theirs, ours, strict=True)))
    rows = {row[0]: row[1:] for row in table.rows if str(row[0]).endswith(": gateway CPU ms")}
    assert rows == {
        "cold turn: gateway CPU ms": [pytest.approx([100, 100]), pytest.approx([200, 100]), pytest.approx([2, 1])],
        "further turns: gateway CPU ms": [
            pytest.approx([20, 40]),
            pytest.approx([10, 20]),
            pytest.approx([0.5, 0.5]),
        ],
    }


def test_another_api_of_the_peer_is_named() -> None:
    socket = evolve(LOAD, api="responses-ws")
    (table,) = report.ratio_tables(
        "theirs", "ours", [(sample(evolve(LOAD, api="responses"), 0.1), sample(socket, 0.1))]
    )
    assert table.title.endswith("beside responses")


def test_a_first_prompt_of_another_length_is_told() -> None:
    assert len(report.notes("ours", [sample(LOAD, 0.1)])) == 1
    _, note = report.notes("ours", [sample(evolve(LOAD, tokens=2000), 0.1)])
    assert note.startswith("OTHER LENGTH")
