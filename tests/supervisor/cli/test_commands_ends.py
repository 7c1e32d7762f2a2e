"""Every command ends with a sentence and its exit code when it is interrupted, its output is closed, or a node is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from protocol.errors import PeerLost
from protocol.messages.cluster import ChildState, Drain, GetStatus, LinkState, NodeState, Reload, Reloaded, Status
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from supervisor import __main__, command_line
from supervisor.cli import commands
from supervisor.cli.client import ClusterClient, NodeRoute

FILE = """
[node.front]
listen = "127.0.0.1:7401"
[node.back]
listen = "127.0.0.1:7411"
[gateway]
node = "front"
processes = 2
[model.tiny]
path = "."
[engine.tiny]
node = "back"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""
CHANGES = ("drain back", "drain front", "restart back", "restart front", "reload")
COMMANDS = ("status", "status --json", "status --watch", *CHANGES)

Ask = Callable[[Message], Awaitable[Message]]
RunCommand = Callable[[str, Ask], int]


async def answer(request: Message) -> Message:
    """Return what a node that is well answers."""
    await trio.lowlevel.checkpoint()
    match request:
        case GetStatus(name):
            return Status(
                name, "r", "1", 1.0, NodeState(()), (ChildState(name, "up", 0, 1.0),), (LinkState("x", False),)
            )
        case Drain():
            return Done()
    return Reloaded()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Run a command of an operator whose nodes all answer by one function, and return its exit code."""
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)

    def run_command(command: str, ask: Ask) -> int:
        async def ask_at(_: ClusterClient, __: NodeRoute, request: Message) -> Message:
            return await ask(request)

        monkeypatch.setattr(ClusterClient, "_ask_at", ask_at)
        return command_line.run_operator_command([str(file), *command.split()])

    return run_command


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", [GetStatus, Drain | Reload], ids=["poll", "request"])
def test_ctrl_c_ends_a_command_without_a_word(
    command: str, kind: type[Message], run: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(request: Message) -> Message:
        if isinstance(request, kind) or "status" in command:
            raise KeyboardInterrupt
        return await answer(request)

    assert run(command, interrupted) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("mistakes", ["", "pages = 1\n"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_output_is_closed_ends_as_by_its_signal(
    command: str,
    mistakes: str,
    run: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cluster.toml").write_text(FILE + mistakes)
    monkeypatch.setattr(commands, "_folders", lambda *_: {"back": tmp_path})
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", encoding="utf-8") as closed, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", closed)
        assert run(command, answer) == 128 + 13
    notice = mistakes and command.split(maxsplit=1)[0] in {"status", "drain"}
    assert capsys.readouterr().err.count("\n") == bool(notice)


@pytest.mark.parametrize("command", [each for each in COMMANDS if "--watch" not in each])  # which goes on
def test_a_node_that_is_lost_ends_a_command_with_one_sentence_for_each(
    command: str, run: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    async def lost(request: Message) -> Message:
        await trio.lowlevel.checkpoint()
        if isinstance(request, GetStatus) and command.split(maxsplit=1)[0] != "status":
            return await answer(request)
        raise PeerLost("it has gone away")

    assert run(command, lost) == 1
    output = "".join(capsys.readouterr())
    assert "it has gone away" in output
    assert "Traceback" not in output
    if command in CHANGES:
        lines = {"drain front": 2, "reload": 3}.get(command, 1)
        assert len(output.splitlines()) == lines, output


def test_a_bug_beside_an_error_is_not_hidden(run: RunCommand) -> None:
    async def fail(request: Message) -> Message:
        await trio.lowlevel.checkpoint()
        if isinstance(request, GetStatus) and request.node == "back":
            raise ZeroDivisionError
        raise PeerLost("it has gone away")

    with pytest.raises(ExceptionGroup) as raised:
        run("drain front", fail)
    assert raised.group_contains(ZeroDivisionError)


@pytest.mark.parametrize("target", ["back", "front"])
def test_nothing_is_drained_for_a_restart_with_a_file_with_mistakes(
    target: str, run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[Message]()

    async def record(request: Message) -> Message:
        asked.append(request)
        return await answer(request)

    (tmp_path / "cluster.toml").write_text(FILE + "pages = 1\nslots = 0\n")
    monkeypatch.setattr(commands, "_folders", lambda *_: {"back": tmp_path})
    assert run(f"restart {target}", record) == 1
    first, *mistakes, last = capsys.readouterr().out.splitlines()
    assert first.endswith("has 2 mistakes:")
    assert len(mistakes) == 2
    assert last == f"Node {target} is not drained: it could not start with this file."
    assert not asked


def test_ctrl_c_inside_a_nursery_ends_the_program_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise BaseExceptionGroup("a nursery", [KeyboardInterrupt()])

    monkeypatch.setattr(command_line, "main", interrupted)
    assert __main__.main() == 130
