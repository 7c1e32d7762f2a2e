"""The end of a server with a simulated engine, and the table of such ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from bench.__main__ import main
from bench.rig.result import Table, read
from bench.shutdown import Ended, Findings, table

CLEAN = Ended(
    scene="SIGTERM, answers run",
    gone_s=2.0,
    after_answers_s=0.5,
    codes={"frontend": 0, "worker": -15},
    endings={"exact": 8, "cut": 1},
    errors=[],
    new_request="503 draining",
    processes=[],
    shared_memory=[],
    files=0,
    port_open=False,
)


def test_a_row_has_what_was_lost_and_what_is_left() -> None:
    stuck = evolve(CLEAN, gone_s=None, processes=["a", "b"], shared_memory=["x"], files=3, port_open=True)
    rows = table({"ours": Findings([CLEAN]), "theirs": Findings([stuck])}, 30.0).rows
    answers = "1 cut, 8 exact"
    assert rows[0] == ["ours: SIGTERM, answers run", 2.0, 0.5, "0 -15", answers, "503 draining", "nothing"]
    left = "2 processes, 1 names of shared memory, 3 temporary files, its port"
    assert (rows[1][1], rows[1][-1]) == (">= 30", left)


@pytest.mark.realtime
def test_a_server_that_ends_tells_every_client_and_leaves_nothing(tmp_path: Path) -> None:
    json = tmp_path / "shutdown.json"
    words = ["shutdown", "--servers", "espalier-simulated-node", "--scenes", "SIGTERM, answers"]
    assert main([*words, "--json", str(json)]) == 0
    document = read(json)
    assert document.schema == "espalier.bench.shutdown/1"
    ends = document.figures[0]
    assert isinstance(ends, Table)
    _, gone_s, after_answers_s, codes, answers, new_request, left = ends.rows[0]
    assert isinstance(gone_s, float)
    assert isinstance(after_answers_s, float)
    assert codes == "0"
    assert isinstance(answers, str)
    assert "cut" not in answers, "on a busy machine some may end in an error, but none without a word"
    assert new_request in {"503 draining", "ConnectionRefusedError"}  # on a busy machine it may have gone by then
    assert left == "nothing"
