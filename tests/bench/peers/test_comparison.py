"""What benches of several servers share."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from attrs import frozen

from bench.peers import comparison
from bench.peers.install import LISTS, digest
from bench.peers.peer import ENVIRONMENTS, MARK, Peer, Setup
from bench.peers.running import NotStarted
from bench.peers.table import SERVERS
from bench.rig.result import Result, Table, read


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    comparison.add(parser, ("espalier", "sglang"))
    return parser.parse_args(words)


def test_the_chosen_servers_are_those_of_the_command_line() -> None:
    assert [peer.name for peer in comparison.peers(arguments())] == ["espalier", "sglang"]
    assert arguments().environments == ENVIRONMENTS
    assert [peer.name for peer in comparison.peers(arguments("--servers", "smg"))] == ["smg"]


def test_every_process_of_a_server_gets_a_variable_beside_its_own(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=1, environments=tmp_path)
    commands = comparison.with_variables(SERVERS["dynamo"], DYN_MIGRATION_LIMIT="3").commands(setup)
    assert {command.variables["DYN_MIGRATION_LIMIT"] for command in commands} == {"3"}
    assert all("DYN_FILE_KV" in command.variables for command in commands)


@frozen
class Findings:
    notes: list[str]
    value: int


def measured(peer: Peer, arguments: argparse.Namespace) -> Findings:
    if peer.name not in arguments.installed:
        raise NotStarted(f"run python -m bench peers install {peer.name}")
    return Findings(["it was slow"], 7)


def tables(results: dict[str, Findings]) -> list[Table]:
    return [Table(title="T", columns=("", "x"), rows=[[name, each.value] for name, each in results.items()], note="N")]


@pytest.mark.parametrize(("installed", "code"), [(["espalier"], 0), ([], 1)])
def test_the_servers_that_can_be_measured_are_in_a_table_and_a_document_and_the_others_are_named(
    installed: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = arguments("--json", str(tmp_path / "a.json"))
    chosen.command, chosen.installed = "resume", installed
    several = comparison.peers(chosen)
    ended = comparison.compare(chosen, ["--x"], several=several, measured=measured, title="Title", tables=tables)
    assert ended == code
    document = read(tmp_path / "a.json")
    assert (document.schema, document.title) == ("espalier.bench.resume/1", "Title")
    assert document.command == ["python", "-m", "bench", "resume", "--x"]
    missing = "SGLang 0.5.23, its own server was not measured: run python -m bench peers install sglang"
    assert missing in document.notes
    output = capsys.readouterr()
    assert missing in output.err
    assert (missing in output.out, "T" in output.out.splitlines(), "N" in output.out.splitlines()) == (True,) * 3
    if installed:
        assert document.notes == [missing, "Espalier, one node: it was slow"]
        assert ["Espalier, one node", 7] in [list(row) for row in tables_of(document)[0].rows]


def tables_of(document: Result) -> list[Table]:
    return [figure for figure in document.figures if isinstance(figure, Table)]


def test_a_server_that_cannot_have_so_many_engines_is_named_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_three(peer: Peer, chosen: argparse.Namespace) -> Findings:
        if peer.name == "sglang":
            (tmp_path / "sglang").mkdir()
            (tmp_path / "sglang" / MARK).write_text(digest(LISTS / "sglang.txt"))
            with comparison.fresh(peer, chosen.environments, slots=1, workers=3):
                pytest.fail("it was started")
        return Findings([], 7)

    chosen = arguments("--environments", str(tmp_path))
    chosen.command = "resume"
    several = comparison.peers(chosen)
    assert comparison.compare(chosen, [], several=several, measured=with_three, title="T", tables=tables) == 0
    assert "own server was not measured: SGLang 0.5.23, its own server has at most 1 engines, not 3" in (
        capsys.readouterr().out
    )
