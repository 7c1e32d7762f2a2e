"""Commands of an operator print what nodes report, escaped and validated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import StringIO
from itertools import chain, pairwise
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
from attrs import evolve
from rich.console import Console
from trio.testing import MockClock

import supervisor
from protocol.errors import NotReady, PeerLost, StartFailed
from protocol.messages.cluster import (
    ChildState,
    Drain,
    GateState,
    Leg,
    LinkState,
    NodeState,
    Offer,
    Reload,
    Reloaded,
    Status,
)
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from supervisor import __main__
from supervisor.cli import client, commands, drain
from supervisor.cli.commands import NEW_NODE_WAIT_S
from supervisor.cli.status_view import StatusOrError
from supervisor.cluster import link_credentials
from supervisor.config import schema, sections


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
            schema.Cluster(model={}, engine={}, cluster=sections.ClusterSection(name="oak")), b"", None, bytes
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


async def test_a_node_that_cannot_be_asked_to_drain_is_named_with_its_reason_escaped(console: Console) -> None:
    away = Polled({"one": "[bold]\x1b]0;title\x07[/]"})
    assert await drain.drain_nodes(away, console, "one") == 1
    assert printed(console)[0].startswith("Node one cannot be asked: [bold]\\x1b]0;title\\x07[/]. If it runs,")
    assert await drain.drain_nodes(away, console, "[red]two") == 1
    assert printed(console)[1] == "There is no node [red]two; there is one."


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


class Draining(Polled):
    """A client of gateway processes that are gone a while after each has been asked to drain."""

    def __init__(self) -> None:
        names = ("front-0", "front-1", "back")
        gates = {name: evolve(status(name), gate=GateState(2, 8, 1, 8)) for name in names}
        super().__init__(dict(gates))
        self.cluster = evolve(self.cluster, processes={"front": names[:2]})
        self.drained_at: dict[str, float] = {}
        self.drains: list[Drain] = []
        self.routes = {name: Path(name) for name in names}
        self.folders = {name: Path(name) for name in names}

    def route(self, name: str) -> client.NodeRoute | None:
        return self.folders.get(name)

    async def ask(self, name: str, request: Message) -> Message:
        await trio.lowlevel.checkpoint()
        if isinstance(request, Drain):
            self.drained_at[name] = trio.current_time()
            self.drains.append(request)
            return Done()
        if trio.current_time() - self.drained_at[name] > 2:
            raise PeerLost("gone") from FileNotFoundError()
        answer = self.statuses[name]
        assert isinstance(answer, Status)
        return answer


async def test_the_name_of_a_gateways_node_drains_all_of_its_processes_at_once(
    console: Console, autojump_clock: MockClock
) -> None:
    cluster, began = Draining(), trio.current_time()
    assert await drain.drain_nodes(cluster, console, "front") == 0
    assert cluster.drained_at.keys() == {"front-0", "front-1"}
    assert trio.current_time() - began < 3
    lines = printed(console)
    assert {"  3 requests run on front-0", "Node front-0 has gone.", "Node front-1 has gone."} <= {*lines}
    assert await drain.drain_nodes(cluster, console, "back") == 0
    assert "back" in cluster.drained_at


class Restarting(Draining):
    """A client of gateway processes, each of which its launcher starts again a while after it is gone."""

    def __init__(self, back_s: float = 5.0) -> None:
        super().__init__()
        self.back_s = back_s

    async def poll(self) -> dict[str, StatusOrError]:
        now = trio.current_time()
        for name, drained_at in self.drained_at.items():
            if now - drained_at > self.back_s:
                self.statuses[name] = status(name, run="again")
            elif now - drained_at > 2:
                self.statuses[name] = "nobody listens"
        return await super().poll()


async def test_the_processes_of_a_gateways_node_are_restarted_one_after_the_other(
    console: Console, autojump_clock: MockClock
) -> None:
    cluster = Restarting()
    assert await drain.restart_nodes(cluster, console, "front") == 0
    assert all(request.restarts for request in cluster.drains)
    first, second = (cluster.drained_at[name] for name in ("front-0", "front-1"))
    assert second - first > 5
    assert [line for line in printed(console) if "is up" in line] == ["Node front-0 is up.", "Node front-1 is up."]


async def test_a_restart_stops_at_the_first_process_that_does_not_come_up(
    console: Console, autojump_clock: MockClock
) -> None:
    cluster = Restarting(back_s=inf)
    assert await drain.restart_nodes(cluster, console, "front") == 1
    assert cluster.drained_at.keys() == {"front-0"}
    assert printed(console)[-1] == "Node front-0 is not up after 600 s: see its log."


@pytest.mark.parametrize(("other", "code"), [("answers", 1), ("drains", 0), ("is gone", 0)])
async def test_a_restart_waits_for_links_to_nodes_that_stay_alone(
    other: str, code: int, console: Console, autojump_clock: MockClock
) -> None:
    class Unlinked(Restarting):
        async def poll(self) -> dict[str, StatusOrError]:
            statuses = await super().poll()
            if isinstance(again := statuses["back"], Status) and again.run == "again":
                statuses["back"] = evolve(again, links=())
                there = evolve(status("x"), state=NodeState((), draining=other == "drains"))
                statuses["x"] = "nobody listens" if other == "is gone" else there
            return statuses

    assert await drain.restart_nodes(Unlinked(), console, "back") == code


async def test_a_process_that_cannot_be_drained_is_named_and_the_others_are_waited_for(
    console: Console, autojump_clock: MockClock
) -> None:
    class OneLost(Draining):
        async def ask(self, name: str, request: Message) -> Message:
            if name == "front-0":
                raise PeerLost("it has gone away")
            return await super().ask(name, request)

    assert await drain.drain_nodes(OneLost(), console, "front") == 1
    assert {"front-0: it has gone away", "Node front-1 has gone."} <= {*printed(console)}


async def test_a_status_adds_up_what_all_gateways_have() -> None:
    gates = {f"front-{number}": evolve(status(f"front-{number}"), gate=GateState(5, 8, number, 4)) for number in (1, 2)}
    first, *_ = await printed_status(gates, 120)
    assert "10 of 16 requests run, 3 of 8 wait at 2 gateways" in first
    first, *_ = await printed_status({"front-1": gates["front-1"]}, 120)
    assert first.endswith("5 of 8 requests run, 1 of 4 wait, all is up")


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
