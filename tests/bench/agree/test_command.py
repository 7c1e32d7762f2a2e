"""`python -m bench agree`: which tools run in which order, and when their figures disagree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.agree import command
from bench.agree.run import Failed, Run
from bench.agree.tools import FIGURES, OTHERS, Load, Tool
from bench.peers.install import LISTS, digest
from bench.peers.peer import MARK, Peer, Setup
from bench.peers.running import Running


class Machine:
    """The server that is up, and the runs so far; `figures` are what each tool measures."""

    def __init__(self) -> None:
        self.setups: list[Setup] = []
        self.runs: list[tuple[str, int, int]] = []
        self.factors: dict[str, list[float]] = {}  # of a tool's first token, by rounds
        self.fails = ""

    @contextmanager
    def start(self, peer: Peer, setup: Setup) -> Iterator[Running]:
        self.setups.append(setup)
        yield Running(peer, setup)

    def run(self, tool: Tool, load: Load, server: Running, folder: Path, environments: Path) -> Run:
        self.runs.append((tool.name, load.clients, load.requests))
        if tool.name == self.fails:
            raise Failed("aiperf 0.13.0 exited with 3")
        factors = self.factors.get(tool.name, [1.0])
        figures = dict.fromkeys(FIGURES, 10.0)
        figures["first token p50 ms"] *= factors.pop(0) if len(factors) > 1 else factors[0]
        if tool.name == "guidellm":
            del figures["gap p50 ms"]
        times = {"first token p50 ms": 9.0, "first token p99 ms": 20.0, "request p50 ms": 390.0}
        return Run(tool.name, load.clients, figures, times, prompt_tokens=136.0, cores=0.5)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    monkeypatch.setattr(command, "started", fake.start)
    monkeypatch.setattr(command, "run", fake.run)
    return fake


@pytest.fixture
def environments(tmp_path: Path) -> str:
    """Return a folder in which every tool seems to be installed."""
    for tool in OTHERS.values():
        assert tool.environment is not None
        (tmp_path / tool.environment).mkdir()
        (tmp_path / tool.environment / MARK).write_text(digest(LISTS / f"{tool.environment}.txt"))
    return str(tmp_path)


def test_tools_alternate_on_one_server(machine: Machine, environments: str) -> None:
    assert main(["agree", "--clients", "8", "--rounds", "2", "--step-ms", "24", "--environments", environments]) == 0
    names = ["load", "aiperf", "guidellm", "bench-serving"]
    assert machine.runs == [(name, 8, 200) for _ in range(2) for name in names]
    assert [(setup.step_s, setup.slots) for setup in machine.setups] == [(0.024, 8)]


def test_a_figure_disagrees_by_the_median_of_its_ratios(
    machine: Machine, environments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.factors = {"aiperf": [1.5, 1.05, 1.08], "guidellm": [0.5, 0.88, 1.0]}
    assert main(["agree", "--clients", "8", "--environments", environments]) == 0
    output = capsys.readouterr().out
    assert "guidellm 0.8.1, 8 clients: first token p50 ms is 0.88 of ours" in output
    assert "aiperf 0.13.0, 8 clients" not in output


def test_agreement_is_said(machine: Machine, environments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agree", "--rounds", "1", "--environments", environments]) == 0
    assert "every figure is within 10% of ours" in capsys.readouterr().out


def test_a_figure_that_a_tool_lacks_has_no_ratio(machine: Machine, environments: str, tmp_path: Path) -> None:
    file = tmp_path / "agree.json"
    words = ["--rounds", "1", "--clients", "8", "--tools", "guidellm", "--environments", environments]
    assert main(["agree", *words, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = {row[0]: row[1:] for row in document["figures"][0]["rows"]}
    assert rows["gap p50 ms"] == [[10.0], [], []]
    assert rows["token p50 ms"] == [[10.0], [10.0], [1.0]]
    assert {each["tool"] for each in document["samples"]} == {"load", "guidellm"}


def test_what_a_tool_adds_to_the_servers_first_token_is_told(
    machine: Machine, environments: str, tmp_path: Path
) -> None:
    machine.factors = {"aiperf": [1.5]}
    file = tmp_path / "agree.json"
    words = ["--rounds", "1", "--clients", "8", "--tools", "aiperf", "--environments", environments]
    assert main(["agree", *words, "--json", str(file)]) == 0
    table = json.loads(file.read_text())["figures"][1]
    place = table["columns"].index("added ms")
    assert {row[0]: row[place] for row in table["rows"]} == {"load": [1.0], "aiperf": [6.0]}


def test_tools_that_are_not_installed_are_named(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = Path(OTHERS["aiperf"].python(tmp_path))
    python.parent.mkdir(parents=True)
    python.touch()  # an installation that did not end
    assert main(["agree", "--tools", "aiperf", "guidellm", "--environments", str(tmp_path)]) == 1
    assert "python -m bench peers install aiperf guidellm" in capsys.readouterr().err
    assert machine.runs == []


def test_a_tool_that_fails_ends_the_command(
    machine: Machine, environments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails = "aiperf"
    assert main(["agree", "--environments", environments]) == 1
    assert "aiperf 0.13.0 exited with 3" in capsys.readouterr().err
