"""Environments are made from their lists, and the command names what cannot be."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.peers import install
from bench.peers.peer import MARK, Setup
from bench.peers.running import missing_environments
from bench.peers.table import RIVALS, SERVERS


class Pip:
    """The programs that an installation runs; pip fails for lists of these names."""

    def __init__(self) -> None:
        self.ran: list[Sequence[str]] = []
        self.fails: set[str] = set()

    def run(self, words: Sequence[str], **_: Any) -> None:
        self.ran.append(words)
        if Path(words[-1]).stem in self.fails:
            raise subprocess.CalledProcessError(1, words)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip()
    monkeypatch.setattr(subprocess, "run", fake.run)
    return fake


def test_an_environment_is_installed_once_all_of_its_list_is(tmp_path: Path, pip: Pip) -> None:
    assert main(["peers", "install", "smg", "--environments", str(tmp_path)]) == 1  # nothing made its folder
    (tmp_path / "smg").mkdir()
    assert main(["peers", "install", "smg", "--environments", str(tmp_path)]) == 1
    (tmp_path / "smg" / "bin").mkdir(parents=True)
    (tmp_path / "smg" / "bin" / "python").touch()
    assert main(["peers", "install", "smg", "--environments", str(tmp_path)]) == 0
    assert pip.ran[-1][-2:] == ["-r", str(install.LISTS / "smg.txt")]
    assert "--no-deps" in pip.ran[-1]
    setup = Setup(folder=tmp_path, port=1, environments=tmp_path)
    assert missing_environments(RIVALS["smg"], setup) == ["sglang"]


def test_an_environment_of_another_list_counts_as_missing_until_it_is_brought_up_to_it(
    tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, environments = tmp_path / "lists", tmp_path / "environments"
    lists.mkdir()
    monkeypatch.setattr(install, "LISTS", lists)
    (lists / "base.txt").write_text("sglang==1\n")
    (lists / "a.txt").write_text("# SGLang\n-r base.txt\ncffi==2\n")
    (environments / "a" / "bin").mkdir(parents=True)
    (environments / "a" / "bin" / "python").touch()
    install.install("a", environments)
    assert install.is_installed("a", environments)
    install.install("a", environments)
    assert len(pip.ran) == 1, "nothing is to be done"
    for changed in ("base.txt", "a.txt"):
        (lists / changed).write_text(f"{(lists / changed).read_text()}more==1\n")
        assert not install.is_installed("a", environments)
        install.install("a", environments)
        assert install.is_installed("a", environments)
    assert len(pip.ran) == 3


def test_what_cannot_be_installed_is_named_and_counts_as_missing(
    tmp_path: Path, pip: Pip, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("smg", "sglang"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
        (tmp_path / name / MARK).write_text("of another list")
    pip.fails = {"sglang"}
    assert main(["peers", "install", "sglang", "smg", "--environments", str(tmp_path)]) == 1
    assert "sglang could not be installed" in capsys.readouterr().err
    setup = Setup(folder=tmp_path, port=1, environments=tmp_path)
    assert missing_environments(RIVALS["smg"], setup) == ["sglang"]


def test_the_list_names_every_server_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "list", "--environments", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(SERVERS)
    missing = [row.split()[0] for row in rows if "python -m bench peers install" in row]
    assert missing == list(RIVALS)
