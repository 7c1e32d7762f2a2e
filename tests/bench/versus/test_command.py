"""`python -m bench versus`: which servers it starts how often, and in which order it asks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from bench.__main__ import main
from bench.cost.sample import Load, Sample
from bench.load.process import Failed
from bench.peers.peer import Peer, Setup
from bench.peers.running import Running
from bench.peers.table import SERVERS
from bench.versus import command
from tests.bench.cost.samples import sample


class Machine:
    """The servers that are up, and the loads that they were asked, in order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.setups: list[Setup] = []
        self.asked: list[tuple[str, str, int, int, int]] = []
        self.waited: list[str] = []
        self.fails = ""

    @contextmanager
    def start(self, peer: Peer, setup: Setup, *, ready: bool) -> Iterator[Running]:
        assert not ready, "both are started together"
        self.started.append(peer.name)
        self.setups.append(setup)
        yield Running(peer, setup)

    def measure(self, load: Load, *, url: str, seed: int, start: int, **_: Any) -> Sample:
        server = next(
            name for name, each in zip(self.started, self.setups, strict=True) if url.endswith(str(each.port))
        )
        assert self.waited == self.started, "nothing is asked before both are ready"
        self.asked.append((server, load.api, load.clients, seed, start))
        if server == self.fails:
            raise Failed("3 x connection refused")
        return evolve(sample(load), start=start)


def wait_ready(running: Running, machine: Machine) -> float:
    machine.waited.append(running.peer.name)
    return 1.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    monkeypatch.setattr(command, "started", fake.start)
    monkeypatch.setattr(command, "measure_load", fake.measure)
    monkeypatch.setattr(Running, "wait_ready", partialmethod(wait_ready, fake))
    return fake


def test_loads_alternate_and_a_pair_has_the_same_prompts(machine: Machine) -> None:
    assert main(["versus", "sglang", "--quick", "--clients", "8"]) == 0
    assert machine.started == ["sglang", "espalier"]
    assert machine.asked == [
        (server, api, 8, 2 * round_number + place, 0)
        for round_number in (0, 1)
        for server, api, place in (
            ("sglang", "chat", 0),
            ("espalier", "chat", 0),
            ("sglang", "chat", 1),  # it has no WebSocket, and no prompt of the load before it
            ("espalier", "responses-ws", 1),
        )
    ]


def test_rounds_are_shared_among_starts(machine: Machine) -> None:
    assert main(["versus", "sglang", "--clients", "8", "--apis", "chat"]) == 0
    assert machine.started == ["sglang", "espalier"] * 3
    assert [start for server, *_, start in machine.asked if server == "espalier"] == [0, 0, 1, 1, 2]
    assert [seed for server, _, _, seed, _ in machine.asked if server == "espalier"] == [0, 1, 2, 3, 4]


def test_both_servers_have_the_same_engine(machine: Machine) -> None:
    assert main(["versus", "sglang", "--quick", "--clients", "100", "--apis", "chat"]) == 0
    theirs, ours = machine.setups
    assert evolve(theirs, folder=ours.folder, port=ours.port) == ours
    assert (ours.slots, theirs.folder != ours.folder, theirs.port != ours.port) == (100, True, True)


@pytest.mark.parametrize(("peer", "ours"), [("dynamo-mocker", "espalier-simulated"), ("dynamo", "espalier")])
def test_a_peer_is_compared_with_ours_that_has_an_engine_of_the_same_kind(
    machine: Machine, peer: str, ours: str
) -> None:
    assert main(["versus", peer, "--quick", "--apis", "chat"]) == 0
    assert machine.started == [peer, ours]


def test_ours_can_be_chosen_but_not_with_another_kind_of_engine(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["versus", "sglang", "--ours", "espalier-nodes", "--quick", "--apis", "chat"]) == 0
    assert machine.started == ["sglang", "espalier-nodes"]
    with pytest.raises(SystemExit):
        main(["versus", "sglang", "--ours", "espalier-simulated"])
    assert "another kind of engine" in capsys.readouterr().err


def test_the_document_has_every_sample_and_the_tables_of_both(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "versus.json"
    assert main(["versus", "sglang", "--quick", "--clients", "8", "--apis", "chat", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [len(several) for several in document["samples"].values()] == [2, 2]
    assert [figure["title"] for figure in document["figures"] if "the clients" not in figure["title"]] == [
        "8 clients, 128 tokens, chat",
        f"{SERVERS['sglang'].title}: 8 clients, 128 tokens, chat",
        f"{SERVERS['espalier'].title}: 8 clients, 128 tokens, chat",
    ]
    assert document["notes"][0] == "rounds: 2; starts of both servers: 1"
