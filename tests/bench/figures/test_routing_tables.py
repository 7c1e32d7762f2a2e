"""The tables of routing have the figures of the kept results, as the programs that measure them wrote those."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from attrs import asdict

from bench.figures.kept import RESULTS
from bench.figures.routing_data import ROUTING, read
from bench.figures.routing_tables import tables
from tests.bench.figures.routing import DATA

TABLES = tables(DATA)


def lines(name: str) -> list[str]:
    head, rule, *rows = TABLES[name].splitlines()
    assert rule.count("|") == head.count("|")
    assert all(row.count("|") == head.count("|") for row in rows)
    return rows


def test_a_policy_has_the_medians_of_its_rounds_and_how_often_it_was_right() -> None:
    assert lines("routing policies") == [
        "| 2 | `round_robin` | 40.0 % | 100 ms | 300 ms | | |",
        "| 2 | `kv` | 80.0 % | 100 ms | 300 ms | | 99.5 % |",
        "| 3 | `kv` | 70.0 % | 100 ms | 300 ms | | |",
        "| 3 | one engine, `kv` | 75.0 % | 100 ms | 300 ms | | |",
    ]


def test_a_choice_has_its_times_and_rounded_numbers_of_blocks() -> None:
    assert lines("routing choices")[2] == ("| 1,000 | 100,000 | 91 us | 80 us | 288 us | 510,000 | 1,640,000 | 1.08 |")


def test_a_cluster_has_its_bytes_and_shares_of_a_core() -> None:
    assert lines("cluster loads")[1] == (
        "| 100 | 1 | 12, 12 | 200 | 20,000 | 0.21, 0.21, 0.21 | 0.10, 0.10, 0.10 | 1,800, 1,800 | 0.028 ms |"
    )
    assert lines("cluster blocks")[0] == "| 10 | 5,120 | 5,400 | 54,000 | 10.5 | 0.010 | 2.2 us | 0.021 | 180 |"


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "scale.json").write_text(
        json.dumps([*map(asdict, DATA.scale), {"run": {"workers": 8, "gateways": 2}, "figures": {}}])
    )
    (tmp_path / "cluster.json").write_text(json.dumps([asdict(run) for run in DATA.cluster]))
    for run in DATA.policies:
        (tmp_path / f"policies-{run.engines}.json").write_text(json.dumps(asdict(run)))
    assert tables(read(tmp_path)) == TABLES, "a run with several gateways has no row"


def test_without_results_there_is_no_table(tmp_path: Path) -> None:
    assert tables(read(tmp_path / "missing")) == {}


def test_a_result_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('[{"workers": "ten", "figures": {}}]')
    with pytest.raises(msgspec.ValidationError, match=r"\[0\]\.workers"):
        read(tmp_path)


def test_all_results_of_routing_are_kept() -> None:
    kept = read(RESULTS / ROUTING)
    assert [run.workers for run in kept.scale] == [run.workers for run in kept.cluster] == [10, 100, 1000]
    assert [run.engines for run in kept.policies] == [2, 3]
