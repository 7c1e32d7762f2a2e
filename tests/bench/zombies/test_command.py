"""Clients leave a server with a simulated engine, and the table says for how long it computed on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.peers.peer import MODEL, Setup
from bench.peers.running import Running
from bench.peers.table import SERVERS
from bench.rig.processes import ProcessEntry
from bench.rig.result import Table, read
from bench.zombies.activity import Activity, Afterwards, EngineEnded, Window
from bench.zombies.command import Findings, Try, tables, tried
from bench.zombies.scenes import SCENES, Left, Stage

NAMES = list(SCENES)


def test_one_table_has_the_times_of_all_servers() -> None:
    ours = Findings(
        [Try(NAMES[0], reached=True, after=Afterwards(0.1, 0.1, limited=False)) for _ in range(2)], 0.01, 0.9, 1
    )
    theirs = Findings(
        [
            Try(NAMES[0], reached=True, after=Afterwards(30.0, 29.0, limited=True), counted={"x": 1.0}),
            Try(NAMES[1], reached=False, after=None, refused="400 no such thing"),
            *(Try(NAMES[2], reached=reached, after=Afterwards(0.3, 0.1, limited=False)) for reached in (True, False)),
            Try(NAMES[3], reached=False, after=Afterwards(0.0, 0.0, limited=False)),
        ]
    )
    times, conditions = tables({"ours": ours, "theirs": theirs}, 30.0)
    assert times.columns == ("a client leaves", "ours", "theirs")
    assert times.rows == [
        [NAMES[0], [0.1, 0.1], ">= 30 in 1 of 1"],
        [NAMES[1], None, "refused: 400 no such thing"],
        [NAMES[2], None, [0.3]],
        [NAMES[3], None, "left in another stage, 1 of 1"],
    ]
    assert [row[0] for row in conditions.rows] == ["ours", "theirs"]


def test_an_engine_that_ended_in_a_scene_has_not_become_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ProcessEntry(2**22 + 1, 1, 1, "1", "S", "sglang::scheduler")
    activity = Activity(Running(SERVERS["sglang"], Setup(folder=Path(), port=1)), [gone], idle=0.01, busy=0.9)
    monkeypatch.setattr("bench.zombies.activity.windows", lambda _: iter([Window(1.0, 0.0), Window(2.0, 0.0)]))
    monkeypatch.setitem(SCENES, NAMES[0], lambda _: Left(time.perf_counter(), reached=True))
    with pytest.raises(EngineEnded, match=rf"^{NAMES[0]}: 1 of 1 processes of the engine ended: sglang::scheduler$"):
        tried(NAMES[0], Stage(1), activity, 30.0)


@pytest.mark.realtime
def test_a_server_computes_no_longer_than_a_moment_for_clients_that_leave_in_mid_stream(tmp_path: Path) -> None:
    json = tmp_path / "zombies.json"
    words = [
        "zombies",
        "--servers",
        "espalier-simulated-node",
        "--tries",
        "1",
        "--scenes",
        "mid stream",
        "--limit-s",
        "15",
    ]
    assert main([*words, "--json", str(json)]) == 0
    document = read(json)
    assert document.schema == "espalier.bench.zombies/1"
    times = document.figures[0]
    assert isinstance(times, Table)
    assert [row[0] for row in times.rows] == [f"in mid stream, {way}" for way in ("close", "reset", "half-close")]
    for row in times.rows:
        assert isinstance(row[1], list), row
        assert max(row[1]) < 12.0, f"{MODEL} computed on: {row}"  # the answers would take 18 s
