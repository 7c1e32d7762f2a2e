"""What benches of several servers share."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.peers import comparison
from bench.peers.peer import ENVIRONMENTS, Peer, Setup
from bench.peers.running import NotInstalled
from bench.peers.table import SERVERS
from bench.rig.result import Table, read


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    comparison.add(parser, ("espalier", "sglang"))
    return parser.parse_args(words)


def test_the_chosen_servers_are_those_of_the_command_line() -> None:
    assert [peer.name for peer in comparison.peers(arguments())] == ["espalier", "sglang"]
    assert arguments().environments == ENVIRONMENTS
    assert [peer.name for peer in comparison.peers(arguments("--servers", "smg"))] == ["smg"]


def test_a_server_that_cannot_be_measured_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(peer: Peer) -> int:
        if peer.name == "sglang":
            raise NotInstalled("run python -m bench peers install sglang")
        return 7

    results, notes = comparison.for_each(comparison.peers(arguments()), measure)
    assert results == {"Espalier, one node": 7}
    assert notes == ["SGLang 0.5.23, its own server was not measured: run python -m bench peers install sglang"]
    assert notes[0] in capsys.readouterr().err


def test_every_process_of_a_server_gets_a_variable_beside_its_own(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=1, environments=tmp_path)
    commands = comparison.with_variables(SERVERS["dynamo"], DYN_MIGRATION_LIMIT="3").commands(setup)
    assert {command.variables["DYN_MIGRATION_LIMIT"] for command in commands} == {"3"}
    assert all("DYN_FILE_KV" in command.variables for command in commands)


@pytest.mark.parametrize(("samples", "code"), [({"ours": [1]}, 0), ({}, 1)])
def test_the_end_of_a_bench_is_a_table_and_a_document(
    samples: dict[str, list[int]], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = argparse.Namespace(command="resume", json=tmp_path / "a.json")
    table = Table(title="T", columns=("a",), rows=[["row"]])
    ended = comparison.finish(
        chosen, ["--x"], comparison.now(), title="Title", figures=[table], notes=["a note"], samples=samples
    )
    assert ended == code
    document = read(tmp_path / "a.json")
    assert (document.schema, document.title, document.notes) == ("espalier.bench.resume/1", "Title", ["a note"])
    assert document.command == ["python", "-m", "bench", "resume", "--x"]
    assert "row" in capsys.readouterr().out
