"""A killed worker with a simulated engine, and the table of such deaths."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import resume
from bench.__main__ import main
from bench.peers.table import SERVERS
from bench.resume import VICTIMS, Death, Findings, at_its_best, table, told_apart
from bench.rig.processes import ProcessEntry
from bench.rig.result import Table, read


def entry(pid: int, parent: int, command: str) -> ProcessEntry:
    return ProcessEntry(pid, parent, pid, "1", "S", command)


def test_a_victim_is_one_process_of_one_worker() -> None:
    processes = [
        entry(1, 0, "python -m supervisor a.toml"),
        entry(2, 1, "python -m supervisor a.toml --node front"),
        entry(3, 1, "python -m supervisor a.toml --node worker-0"),
        entry(4, 3, "python -m host"),
        entry(5, 4, "sglang::scheduler"),
        entry(6, 4, "sglang::scheduler"),
    ]
    assert [victim(processes) for victim in VICTIMS.values()] == [5, 4, 3]
    assert [victim(processes[:2]) for victim in VICTIMS.values()] == [None, None, None]


def test_a_server_is_measured_with_the_migrations_that_it_has() -> None:
    assert at_its_best(SERVERS["espalier"]) == SERVERS["espalier"]
    assert at_its_best(SERVERS["dynamo"]).title.endswith("3 migrations")


@pytest.mark.parametrize(
    ("moved", "apart"),
    [([0, 0, 10, 14], True), ([0, 0, 9, 14], False), ([0, 0, 0, 0], False), ([], False), ([10, 11], True)],
)
def test_streams_are_told_apart_once_those_that_go_on_have_moved_far(moved: list[int], apart: bool) -> None:
    assert told_apart(moved) == apart


def test_a_row_tells_when_streams_went_on_and_how_they_ended() -> None:
    death = Death(
        victim="the engine's node",
        streams=8,
        on_it=4,
        next_token_s=[0.1, 0.2],
        ended_s=[0.5, 0.5],
        endings={"exact": 2, "cut": 2},
        others={"exact": 4},
        errors=[],
        asked=40,
        failed=1,
        last_failed_s=0.3,
    )
    assert table({"ours": Findings([death])}).rows == [
        [
            "ours: the engine's node",
            "4 of 8",
            [0.1, 0.2],
            "2 cut, 2 exact",
            [0.5, 0.5],
            "4 exact",
            "1 of 40",
            0.3,
        ]
    ]


@pytest.mark.realtime
def test_the_streams_of_a_killed_node_go_on_with_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "STOPPED_MAX_S", 10.0)  # a busy machine lets streams of the others pause
    json = tmp_path / "resume.json"
    assert main(["resume", "--servers", "espalier-simulated", "--json", str(json)]) == 0
    document = read(json)
    assert document.schema == "espalier.bench.resume/1"
    deaths = document.figures[0]
    assert isinstance(deaths, Table)
    assert len(deaths.rows) == 1, "simulated engines have no process but their node"
    _, on_it, next_token_s, ended, _, others, *_ = deaths.rows[0]
    assert isinstance(on_it, str)
    streams = int(on_it.partition(" ")[0])
    assert 0 < streams < 8
    assert isinstance(next_token_s, list)
    assert len(next_token_s) == streams
    assert (ended, others) == (f"{streams} exact", f"{8 - streams} exact")
