"""Clients leave a server with a simulated engine, and the table says for how long it computed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.peers.peer import MODEL
from bench.rig.result import Table, read
from bench.zombies.activity import Afterwards
from bench.zombies.command import Findings, Try, tables
from bench.zombies.scenes import SCENES

NAMES = list(SCENES)


def test_one_table_has_the_times_of_all_servers() -> None:
    ours = Findings(
        [Try(NAMES[0], reached=True, after=Afterwards(0.1, 0.1, limited=False)) for _ in range(2)], 0.01, 0.9, 1
    )
    theirs = Findings(
        [
            Try(NAMES[0], reached=True, after=Afterwards(30.0, 29.0, limited=True), counted={"x": 1.0}),
            Try(NAMES[1], reached=False, after=None, refused="400 no such thing"),
        ]
    )
    times, conditions = tables({"ours": ours, "theirs": theirs}, 30.0)
    assert times.columns == ("a client leaves", "ours", "theirs")
    assert times.rows == [
        [NAMES[0], [0.1, 0.1], ">= 30 in 1 of 1"],
        [NAMES[1], None, "refused: 400 no such thing"],
    ]
    assert [row[0] for row in conditions.rows] == ["ours", "theirs"]


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
