"""A launcher that cannot start a node leaves nothing open and ends in time; it follows its file."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import StartFailed
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import load_cluster
from supervisor.launcher import launcher, node_process, preflight
from supervisor.launcher.kept_node import KeptNode
from supervisor.launcher.launcher import Launcher
from supervisor.processes import process
from supervisor.supervision.supervise import supervise
from supervisor.telemetry.logs import Terminal
from tests.rig.files import read_inline
from tests.rig.launched import SIMULATED, THIRD
from tests.rig.log_records import log_records

TINY = Path(__file__).parents[3] / "examples" / "tiny"
FILE = SIMULATED.format(ports=(7400, 7401, 7402), tiny=TINY)
THREE = THIRD.format(port=7403)


class Exited(Exception):
    """What stands for the end of this process."""


@pytest.fixture
def one(written: Callable[[str], Path]) -> Launcher:
    """A launcher of the file's nodes that has not run yet."""
    names = ("front", "one", "two")
    terminal = Terminal(io.StringIO(), live=True)
    loaded, chance = load_cluster(written(FILE)), random.Random(0)
    return Launcher(loaded, names, ("false",), {}, terminal, chance, reads=read_inline, placed={*names})


def kept(cluster: Cluster, name: str) -> KeptNode:
    return KeptNode(name, node_process.time_limits(cluster, name)[1], 30.0)


@pytest.fixture
async def following(
    one: Launcher, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> Callable[[Any], Any]:
    """A launcher whose nodes run, as far as it knows; which others it starts is only noted."""
    started = []
    for name in one.names:
        one.nodes[name] = kept(one.loaded.cluster, name)
    monkeypatch.setattr(preflight, "check_can_start", lambda *_: None)

    def start(self: Launcher, name: str, cluster: Cluster) -> None:
        self.nodes[name] = kept(cluster, name)
        started.append(name)

    monkeypatch.setattr(Launcher, "start_node", start)
    nursery.start_soon(one.follow_file)

    async def follow(text: str) -> list[Any]:
        one.loaded.file.write_text(text)
        started.clear()
        one.reload()
        await trio.sleep(2 * launcher.SETTLE_S)
        return list(started)

    return follow


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# Starting -------------------------------------------------------------------------------------


async def test_a_node_that_cannot_be_started_leaves_no_descriptor_open(
    one: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "no process can be had")

    monkeypatch.setattr(node_process, "start", fails)
    node, before = kept(one.loaded.cluster, "one"), descriptors()
    for _ in range(5):
        with pytest.raises(ExceptionGroup) as caught:
            await node_process.run(node, one, 60.0)
        assert caught.group_contains(OSError, match="no process can be had")
    assert descriptors() == before
    assert node.process is None


@pytest.mark.realtime
async def test_a_node_that_is_drained_before_it_is_up_has_not_failed(one: Launcher) -> None:
    says = (
        "import sys; from supervisor.launcher.parent_pipe import ParentPipe; ParentPipe(int(sys.argv[-1])).send('done')"
    )
    one.command, one.environment = (sys.executable, "-c", says), dict(os.environ)
    node = KeptNode("two", process.Ladder(), 30.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(node_process.run, node, one, 60.0)
    assert node.process is None


def test_a_process_that_cannot_be_watched_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    def fails(_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(os, "pidfd_open", fails)
    with pytest.raises(OSError, match="too many open files"):
        process.start("x", [sys.executable, "-c", "import time; time.sleep(60)"], {}, [], subprocess.DEVNULL)
    assert [process.returncode for process in processes] == [-9]


@pytest.mark.parametrize("lives_s", [0.0, 4.0, 59.0, 61.0])
async def test_a_node_that_dies_again_and_again_ends_no_other(
    one: Launcher, lives_s: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    lives = []

    async def run(*_: object, task_status: trio.TaskStatus[None]) -> None:
        lives.append(trio.current_time())
        await trio.sleep(0.5)
        task_status.started()
        await trio.sleep(lives_s)
        raise node_process.NodeDied("node one ended")

    monkeypatch.setattr(node_process, "run", run)
    with trio.move_on_after(3600) as hour:
        tree = node_process.tree(one.loaded.cluster, kept(one.loaded.cluster, "one"), one)
        await supervise(tree, rng=random.Random(0))
    assert hour.cancelled_caught
    assert lives[1] - lives[0] < lives_s + 1, "the first time it is back at once"
    assert 3600 / (lives_s + 40) < len(lives) < 3600 / 20


# Ending ---------------------------------------------------------------------------------------


async def test_after_a_second_signal_a_launcher_exits_as_soon_as_a_single_node_would(
    one: Launcher, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    cleaned = []

    def exits(code: int) -> NoReturn:
        raise Exited(code)

    monkeypatch.setattr(launcher, "clean_up", lambda: cleaned.append(trio.current_time()))
    monkeypatch.setattr(os, "_exit", exits)
    began = trio.current_time()
    with pytest.RaisesGroup(pytest.RaisesExc(Exited, match="130")):
        async with trio.open_nursery() as one.tasks:
            one.on_second_signal(signal.SIGINT)
    assert trio.current_time() - began == pytest.approx(1.2)
    assert len(cleaned) == 1
    with one.grace.wait_at_most(60) as scope:
        assert scope.deadline - trio.current_time() < 1.2


# The file -------------------------------------------------------------------------------------


async def test_a_node_that_is_new_in_the_file_is_started_once(
    following: Callable[[Any], Any], autojump_clock: MockClock
) -> None:
    assert await following(FILE) == []
    assert await following(FILE + THREE) == ["three"]
    assert await following(FILE + THREE) == []


async def test_an_address_that_several_gateways_serve_is_announced_once(
    written: Callable[[str], Path], autojump_clock: MockClock
) -> None:
    loaded = load_cluster(written(FILE.replace('node = "front"', 'node = "front"\nprocesses = 2')))
    names = ("front-0", "front-1", "one", "two")
    one = Launcher(loaded, names, ("false",), {}, Terminal(io.StringIO(), live=True), random.Random(0))
    for name in names:
        one.nodes[name] = kept(loaded.cluster, name)
        one.nodes[name].serving = True
        one.announcer.on_up(name)
    for name in ("front-0", "front-1", "front-0"):
        one.announce(name, "Ready: http://127.0.0.1:8000")
    one.terminal.flush()
    assert one.terminal.out.getvalue().count("Ready: http://127.0.0.1:8000") == 1  # type: ignore[attr-defined]
    for name in ("front-0", "front-1"):  # both have died
        one.nodes[name].serving = False
    one.announce("front-1", "Ready: http://127.0.0.1:8000")
    one.terminal.flush()
    assert one.terminal.out.getvalue().count("Ready: http://127.0.0.1:8000") == 2  # type: ignore[attr-defined]


async def test_a_node_of_another_host_is_not_started(
    following: Callable[[Any], Any], autojump_clock: MockClock
) -> None:
    assert await following(FILE + THREE.replace("[node.three]", '[node.three]\nhost = "192.0.2.1"')) == []


async def test_a_node_that_was_drained_stays_away_until_it_is_new_in_the_file_again(
    one: Launcher, following: Callable[[Any], Any], autojump_clock: MockClock
) -> None:
    await following(FILE + THREE)
    one.nodes["three"].ended.set()
    assert await following(FILE + THREE) == []
    assert await following(FILE) == []
    assert await following(FILE + THREE) == ["three"]


async def test_a_node_that_was_removed_from_the_file_is_logged_once_and_not_restarted(
    one: Launcher, following: Callable[[Any], Any], caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    await following(FILE + THREE)
    one.nodes["three"].serving = True
    with caplog.at_level(logging.WARNING):
        assert await following(FILE) == []
        assert await following(FILE) == []
    assert [record.message for record in log_records(caplog)] == [
        "node three is in the file no more, and runs until it is drained"
    ]
    assert one.nodes["three"].removed
    assert await following(FILE + THREE) == []  # it runs
    assert not one.nodes["three"].removed


async def test_a_node_that_was_starting_when_the_file_changed_reads_it_again_once_it_is_up(
    following: Callable[[Any], Any], one: Launcher, autojump_clock: MockClock
) -> None:
    sent = list[tuple[str, int]]()
    for name, node in one.nodes.items():
        node.process = cast("Any", SimpleNamespace(send_signal=lambda number, name=name: sent.append((name, number))))
    one.nodes["front"].serving = True
    await following(FILE)
    assert not sent
    for _ in range(2):
        for node in one.nodes.values():
            node.serving = True
            node.reload_if_outdated()
    assert sent == [("one", signal.SIGHUP), ("two", signal.SIGHUP)]


async def test_a_node_that_could_not_be_started_is_tried_again_at_the_next_reload(
    following: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    def taken(*_: object) -> NoReturn:
        raise StartFailed("port 7403 of 127.0.0.1 cannot be had")

    monkeypatch.setattr(preflight, "check_can_start", taken)
    assert await following(FILE + THREE) == []
    assert [(record.message, record.reason) for record in log_records(caplog)] == [
        ("node three was not started; the others run on", "port 7403 of 127.0.0.1 cannot be had")
    ]
    monkeypatch.setattr(preflight, "check_can_start", lambda *_: None)
    assert await following(FILE + THREE) == ["three"]


async def test_a_node_that_may_drain_for_longer_is_given_the_time(
    one: Launcher, following: Callable[[Any], Any], autojump_clock: MockClock
) -> None:
    before = one.nodes["one"].ladder.term_s
    await following(FILE.replace("[node.one]", "[node.one]\ndrain_s = 300"))
    assert one.nodes["one"].ladder.term_s == before + 270
    await following(FILE)  # it may have begun to drain by then
    assert one.nodes["one"].ladder.term_s == before + 270


async def test_a_file_that_cannot_be_read_changes_nothing(
    following: Callable[[Any], Any], caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    assert await following("nonsense") == []
    assert [record.message for record in log_records(caplog)] == ["the file changes nothing"]
    assert await following(FILE + THREE) == ["three"]


async def test_a_node_that_was_removed_from_the_file_and_is_not_up_is_not_retried(
    one: Launcher, following: Callable[[Any], Any], autojump_clock: MockClock
) -> None:
    await following(FILE + THREE)
    await following(FILE)
    assert one.nodes["three"].scope.cancel_called
