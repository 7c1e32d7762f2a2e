"""A node is found by its run folder and answers there as long as it runs, even if the temporary folder is cleaned."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from actors.engines import leftover_memory
from actors.kit.calls import Function
from protocol.messages.cluster import Drain, GetStatus, NodeState, Status
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from supervisor.cli.client import ClusterClient
from supervisor.config.schema import Cluster
from supervisor.config.sections import NodeSection
from supervisor.control import unix_socket
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.serving import Services
from supervisor.processes import run_folder
from tests.rig.nodes import until

T = TypeVar("T")
CHECK_S = 0.005
OTHER = 65534  # another user
STATUS = Status("one", "r", "1", 1.0, NodeState(()), (), ())
MADE_AGAIN = "made the socket for operators anew: it was gone"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder for run folders, whose path is longer than the address of a socket may be."""
    path = tmp_path / ("deep" * 30)
    path.mkdir()
    return path


class Served:
    """A node that has only a run folder, and answers every request."""

    def __init__(self, base: Path, folder: run_folder.RunFolder) -> None:
        self.base, self.folder, self.file = base, folder, base / "cluster.toml"
        self.held, self.holds = trio.Event(), False

    async def answer(self, request: Drain | GetStatus) -> Done | Status:
        if isinstance(request, Drain):
            self.holds = True
            await self.held.wait()
            return Done()
        return STATUS

    async def run(self) -> None:
        function: Function[Any, Any, Any] = Function(self.answer)
        services: Services = {("", GetStatus): function, ("", Drain): function}
        await unix_socket.serve(self.folder, self.file, "one", services, Heartbeat(1.0, 3.0), check_s=CHECK_S)

    @property
    def found(self) -> bool:
        return [node.folder for node in unix_socket.running_nodes(self.base, self.file)] == [str(self.folder.path)]

    async def ask(self, request: Drain | GetStatus) -> Message:
        cluster = Cluster(model={}, engine={}, node={"one": NodeSection()})
        operator = ClusterClient(cluster, b"", None, lambda: os.urandom(32), {"one": self.folder.path})
        operator.routes["one"] = self.folder.path
        return await operator.ask("one", request)

    async def is_found_and_answers(self) -> None:
        await until(lambda: self.found)
        assert await self.ask(GetStatus("one")) == STATUS


@asynccontextmanager
async def served(base: Path) -> AsyncIterator[Served]:
    with run_folder.run_folder(base, leftover_memory.remove) as folder:
        async with trio.open_nursery() as nursery:
            node = Served(base, folder)
            nursery.start_soon(node.run)
            await until(lambda: node.found)
            yield node
            nursery.cancel_scope.cancel()
    assert not folder.path.exists()


def remove(folder: Path, what: str) -> None:
    if what == "all":
        shutil.rmtree(folder)
    elif what == "all that is in it":
        for each in folder.iterdir():
            each.unlink()
    else:
        (folder / what).unlink()


@pytest.mark.parametrize("what", ["all", "all that is in it", "control", "node.json", "lock"])
async def test_o_a_node_whose_run_folder_was_cleaned_is_found_and_answers_again(
    base: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    caplog.set_level(logging.INFO)
    async with served(base) as node:
        await node.is_found_and_answers()
        remove(node.folder.path, what)
        await until(lambda: MADE_AGAIN in caplog.messages)
        await node.is_found_and_answers()
        assert caplog.messages.count(MADE_AGAIN) == 1
        assert stat.S_IMODE(node.folder.path.stat().st_mode) == 0o700
        assert stat.S_IMODE((node.folder.path / "node.json").stat().st_mode) == 0o600
        assert run_folder.remove_stale(base, leftover_memory.remove) == [], "a node that runs holds its lock"


@pytest.mark.parametrize("what", ["control", "node.json"])
async def test_o_a_file_with_the_name_of_the_socket_or_the_description_is_replaced_and_no_link_is_followed(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    async with served(base) as node:
        (tmp_path / "link").symlink_to(precious)
        (tmp_path / "link").rename(node.folder.path / what)
        await until(lambda: MADE_AGAIN in caplog.messages)
        await node.is_found_and_answers()
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("placed", ["a link", "open to others", "another's"])
async def test_a_folder_that_somebody_else_has_put_in_place_of_the_run_folder_is_not_used(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, placed: str
) -> None:
    if placed == "another's" and os.geteuid() != 0:
        pytest.skip("only root may give a folder away")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    async with served(base) as node:
        path = node.folder.path
        trap = tmp_path / "trap"
        if placed == "a link":
            trap.symlink_to(elsewhere)
        else:
            trap.mkdir(mode=0o700 if placed == "another's" else 0o777)
            trap.chmod(0o700 if placed == "another's" else 0o777)
            (trap / "hers").touch()
        if placed == "another's":
            os.chown(trap, OTHER, OTHER)
        path.rename(tmp_path / "cleaned")
        trap.rename(path)
        await until(lambda: "operators cannot ask this node by its socket" in caplog.messages)
        assert sorted(each.name for each in path.iterdir()) == ([] if placed == "a link" else ["hers"])
        path.unlink() if placed == "a link" else shutil.rmtree(path)
        await node.is_found_and_answers()
        assert caplog.messages.count("operators cannot ask this node by its socket") == 1
    assert list(elsewhere.iterdir()) == []


async def test_o_a_request_in_progress_survives_when_the_socket_is_made_again(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    async with served(base) as node, trio.open_nursery() as nursery:

        async def drain() -> None:
            answers.append(await node.ask(Drain("one")))

        await node.is_found_and_answers()
        nursery.start_soon(drain)
        await until(lambda: node.holds)
        shutil.rmtree(node.folder.path)
        await until(lambda: MADE_AGAIN in caplog.messages)
        node.held.set()
        await until(lambda: answers)
    assert answers == [Done()]


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
async def test_a_check_that_fails_does_not_count_as_a_missing_socket(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, failure: OSError | RuntimeError
) -> None:
    failed = []

    async def run_sync(function: Callable[[], T], **_: object) -> T:
        await trio.lowlevel.checkpoint()
        if function.__name__ == "is_intact":
            failed.append(function)
            raise failure
        return function()

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    async with served(base) as node:
        await until(lambda: len(failed) > 3)
        await node.is_found_and_answers()
    assert caplog.messages == []


def test_the_address_of_a_socket_is_short_however_deep_its_folder(base: Path) -> None:
    with unix_socket.socket_address(base) as where:
        assert Path(where).parent.resolve() == base.resolve()
        assert len(where) < 50
