"""Commands of an operator print what nodes report, escaped and validated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import StringIO
from itertools import chain, pairwise
from math import inf, nan
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
from rich.console import Console
from trio.testing import MockClock

import supervisor
from protocol.cluster import ChildState, Leg, LinkState, NodeState, Offer, Reload, Reloaded, Status
from protocol.errors import NotReady, PeerViolation, StartFailed
from protocol.kind import Message
from supervisor import __main__, command_line
from supervisor.cli import client, commands
from supervisor.cli.commands import NEW_NODE_WAIT_S
from supervisor.cli.status_view import StatusOrError
from supervisor.cluster import link_credentials
from supervisor.config import schema


def status(
    name: str,
    *,
    run: str = "r",
    up_s: float = 1.0,
    since_s: float = 1.0,
    silent_s: float = 0.1,
    offers: tuple[Offer, ...] = (),
) -> Status:
    tree = (ChildState(name, "up", 0, since_s),)
    return Status(name, run, "1", up_s, NodeState(offers), tree, (LinkState("x", True, silent_s),))


class Cluster(client.ClusterClient):
    """A client in which each node answers from its time in `at` on."""

    def __init__(self, at: Mapping[str, float], answers: Mapping[str, Reloaded | Exception] | None = None) -> None:
        super().__init__(
            schema.Cluster(model={}, engine={}, cluster=schema.ClusterSection(name="oak")), b"", None, bytes
        )
        self.at, self.answers = at, answers or {}
        self.asked: list[Message] = []

    async def poll(self) -> dict[str, StatusOrError]:
        await trio.lowlevel.checkpoint()
        now = trio.current_time()
        return {name: status(name) if since <= now else "nobody listens" for name, since in self.at.items()}

    async def ask(self, name: str, request: Message) -> Message:
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        answer = self.answers.get(name, Reloaded())
        if isinstance(answer, Exception):
            raise answer
        return answer


FILE = """
[node.front]
listen = "127.0.0.1:7401"
[node.back]
listen = "127.0.0.1:7402"
[cluster]
secret = "secret"
[gateway]
node = "front"
[model.tiny]
path = "."
[engine.tiny]
node = "back"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""


def by_secret(cluster: schema.Cluster, folders: Mapping[str, Path]) -> client.ClusterClient:
    """Return a client of the cluster; raises `StartFailed` without a secret."""
    if cluster.model:
        link_credentials.cluster_secret(cluster, {})
    return client.ClusterClient(cluster, b"", None, bytes, folders)


def asks(file: Path, folders: Mapping[str, Path]) -> tuple[list[str], list[str], str]:
    """Return the nodes that a client asks, those of them that run here, and the mistakes in the file."""
    cluster_client, wrong = commands.make_client(file, folders, by_secret, use_broken_file=False)
    return sorted(cluster_client.cluster.node), sorted(cluster_client.folders), wrong


@pytest.mark.parametrize(
    ("text", "message", "nodes"),
    [
        (FILE + "slots = 0\n", "has 1 mistake", ["back", "front"]),
        (FILE + "[", "is not TOML", ["front"]),
        (FILE.replace('"secret"', '"nowhere"'), "there is no file", ["front"]),
        (FILE.replace('"secret"', '"nowhere"') + "slots = 0\n", "has 2 mistakes", ["front"]),
    ],
)
def test_nodes_that_run_here_can_be_asked_although_the_file_has_mistakes(
    text: str, message: str, nodes: list[str], tmp_path: Path
) -> None:
    file, secret = tmp_path / "cluster.toml", tmp_path / "secret"
    secret.write_text("a-secret-of-the-cluster")
    secret.chmod(0o600)
    here = {"front": tmp_path}
    file.write_text(FILE)
    assert asks(file, here) == (["back", "front"], ["front"], "")
    file.write_text(text)
    found, local, wrong = asks(file, here)
    assert (found, local, message in wrong) == (nodes, ["front"], True), wrong
    with pytest.raises(StartFailed, match=message):
        asks(file, {})


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=80, color_system=None)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


async def test_a_reload_waits_until_a_node_that_a_launcher_starts_answers(
    console: Console, autojump_clock: MockClock
) -> None:
    began = trio.current_time()
    cluster = Cluster({"one": 0, "two": began + 3}, {"one": Reloaded(("node two is known now",), (), ("two",))})
    assert await commands.reload_nodes(cluster, console) == 0
    assert printed(console) == ["one:", "  node two is known now", "two: it runs now"]
    assert cluster.asked == [Reload("one")]
    assert 3 <= trio.current_time() - began < 4


async def test_a_reload_waits_only_for_nodes_that_start_and_only_for_a_time(
    console: Console, autojump_clock: MockClock
) -> None:
    began = trio.current_time()
    assert await commands.reload_nodes(Cluster({"one": 0, "two": inf}), console) == 1
    assert trio.current_time() == began
    starts = Cluster({"one": 0, "two": inf}, {"one": Reloaded((), (), ("two", "nobody"))})
    assert await commands.reload_nodes(starts, console) == 1
    assert NEW_NODE_WAIT_S <= trio.current_time() - began < NEW_NODE_WAIT_S + 1
    assert printed(console) == ["one: nothing has changed", "two: not asked: nobody listens"] * 2


async def test_a_node_that_refuses_to_reload_is_named_with_its_reason_and_the_others_are_asked(
    console: Console,
) -> None:
    cluster = Cluster({"one": 0, "two": 0}, {"one": NotReady("[red]no[/]\x1b[2J")})
    assert await commands.reload_nodes(cluster, console) == 1
    assert printed(console) == ["one: [red]no[/]\\x1b[2J", "two: nothing has changed"]


def test_a_reload_prints_the_mistakes_in_its_file_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def asks_nobody(*_: object) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    monkeypatch.setattr(commands, "reload_nodes", asks_nobody)
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.replace('secret = "secret"\n', "") + "slots = 0\npages = 1\n")
    assert commands.main([str(file), "reload"], {}, bytes) == 1
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{file} has {len(rows)} mistakes:"
    assert [row.split(": ")[1].split(".")[-1] for row in rows] == ["slots", "pages"]


async def test_a_node_that_cannot_be_asked_to_drain_is_named_with_its_reason_escaped(console: Console) -> None:
    away = Polled({"one": "[bold]\x1b]0;title\x07[/]"})
    assert await commands.drain_node(away, console, "one") == 1
    assert printed(console)[0].startswith("Node one cannot be asked: [bold]\\x1b]0;title\\x07[/]. If it runs,")
    assert await commands.drain_node(away, console, "[red]two") == 1
    assert printed(console)[1] == "There is no node [red]two; there is one."


@pytest.mark.parametrize("impossible", [{"up_s": nan}, {"since_s": inf}, {"silent_s": nan}])
def test_a_status_with_impossible_times_is_a_violation(impossible: dict[str, Any]) -> None:
    assert client.validated_status(status("one")) == status("one")
    with pytest.raises(PeerViolation, match="times that cannot be"):
        client.validated_status(status("one", **impossible))


def test_a_status_with_an_impossible_engine_is_a_violation() -> None:
    with pytest.raises(PeerViolation):
        client.validated_status(status("one", offers=(Offer("a", "m", Leg.BOTH, 4, True, None, 0, 0, 0, nan),)))


# What a terminal shows --------------------------------------------------------------------

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LOST = "the engine was killed by SIGKILL, and nobody knows why"
HEADS = {
    "node": ("node", "state", "since", "restarts", "about"),
    "engine": ("engine", "node", "model", "leg", "state", "run", "wait", "slots", "tokens", "KV"),
    "link": ("link", "to", "state", "silent", "streams", "messages", "sent", "received"),
}


def serving(node: str, engine: str, leg: Leg, model: str = LLAMA) -> Status:
    """Return the status of a node under load whose engine has crashed."""
    router = f"router-{model.replace('/', ':')}"
    members = ("", "/links", f"/{engine}", f"/{engine}/engine", f"/{engine}/{leg}", f"/{router}")
    tree = tuple(ChildState(f"{node}{member}", "up", 0, 250_000.0, f"what serves {model}") for member in members)
    lost = ChildState(tree[3].path, "starts again", 3, 4.0, "SGLang", LOST)
    offers = (Offer(engine, model, leg, 256, False, None, 200, 13, 1_234_567, 0.87),)
    links = (LinkState("gpu-node-17", True, 0.2, 128, 4_567_890, 2_500_000_123, 870_000_000_000),)
    return Status(node, "r", "1", 250_000.0, NodeState(offers), (*tree[:3], lost, *tree[4:]), links)


LARGE: dict[str, StatusOrError] = {
    "prefill-host-one": serving("prefill-host-one", "llama-prefill-0", Leg.PREFILL),
    "decode-host-two": serving("decode-host-two", "llama-decode-0", Leg.DECODE),
    "gpu-node-17": "10.0.0.17:7401 cannot be reached",
}
LONGEST: dict[str, StatusOrError] = {"n" * 128: serving("n" * 128, "e" * 128, Leg.BOTH, "m" * 128)}


class Polled(Cluster):
    """A client that has received these statuses."""

    def __init__(self, statuses: Mapping[str, StatusOrError]) -> None:
        super().__init__({})
        self.statuses = dict(statuses)

    async def poll(self) -> dict[str, StatusOrError]:
        await trio.lowlevel.checkpoint()
        return self.statuses


async def printed_status(statuses: Mapping[str, StatusOrError], width: int) -> list[Any]:
    """Return the lines that `status` prints in a terminal of this width."""
    console = Console(file=StringIO(), width=width, color_system=None)
    code = await commands.print_status(Polled(statuses), console, as_json=False, watch=False)
    assert code == any(isinstance(status, str) for status in statuses.values())
    assert all(len(line) <= width for line in printed(console))
    return [line.rstrip() for line in printed(console)]


def heads(lines: list[str]) -> dict[Any, Any]:
    """Return the heads of the columns of each table, by the first of them."""
    return {line.split()[0]: tuple(line.split()) for before, line in pairwise(lines) if not before}


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("statuses", [LARGE, LONGEST], ids=["large", "longest"])
async def test_no_head_of_a_column_is_cut_and_columns_without_room_are_named(
    statuses: dict[str, Any], width: int
) -> None:
    lines = await printed_status(statuses, width)
    shown = heads(lines)
    left_out = [line.removeprefix("no room for: ").split(", ") for line in lines if line.startswith("no room for: ")]
    assert shown.keys() == HEADS.keys()
    for first, every in HEADS.items():
        assert shown[first] == tuple(head for head in every if head in shown[first])
    assert sorted(chain(*shown.values(), *left_out)) == sorted(chain(*HEADS.values()))


async def test_with_short_names_no_column_is_left_out_at_a_width_of_80() -> None:
    assert heads(await printed_status({"one": serving("one", "tiny-1", Leg.BOTH, "tiny")}, 80)) == HEADS


@pytest.mark.parametrize("width", [60, 80])
async def test_names_of_nodes_and_engines_are_whole_in_a_narrow_terminal(width: int) -> None:
    lines = await printed_status(LARGE, width)
    rows = [line.split()[:2] for line in lines]
    assert ["llama-prefill-0", "prefill-host-one"] in rows
    assert ["prefill-host-one", "gpu-node-17"] in rows
    assert {"prefill-host-one", "decode-host-two", "gpu-node-17"} <= {line.partition("  ")[0] for line in lines}


async def test_a_name_too_long_for_a_terminal_is_folded_between_the_lines_of_the_tree() -> None:
    lines = await printed_status(LONGEST, 60)
    for lead, others, letter in (("├─ ", "│  ", "e"), ("└─ router-", "   ", "m")):
        first = next(at for at, line in enumerate(lines) if line.startswith(lead + letter))
        folded = [line for line in lines[first + 1 : first + 6] if line.startswith(others + letter)]
        assert lines[first].split()[1].count(letter) + sum(line.count(letter) for line in folded) == 128


async def test_problems_come_first_and_are_indented_where_they_are_folded() -> None:
    lines = await printed_status(LARGE, 60)
    assert lines[1:8] == [
        "  prefill-host-one/llama-prefill-0/engine starts again:",
        f"    {LOST}",
        "  decode-host-two/llama-decode-0/engine starts again: the",
        f"    {LOST.removeprefix('the ')}",
        "  node gpu-node-17 does not answer: 10.0.0.17:7401 cannot",
        "    be reached",
        "",
    ]


def test_an_error_of_a_command_is_printed_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*_: object) -> NoReturn:
        raise NotReady("node b is away")

    monkeypatch.setattr(commands, "main", away)
    assert command_line.run_operator_command(["cluster.toml", "drain", "b"]) == 1
    assert capsys.readouterr().err == "espalier: node b is away\n"


class Interrupted:
    """A finder of modules that is interrupted by Ctrl-C."""

    def find_spec(self, *_: object) -> NoReturn:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_modules_are_imported_ends_the_program_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "supervisor.command_line")
    monkeypatch.delattr(supervisor, "command_line")
    monkeypatch.setattr(sys, "meta_path", [Interrupted()])
    assert __main__.main() == 130
    assert capsys.readouterr() == ("", "")
