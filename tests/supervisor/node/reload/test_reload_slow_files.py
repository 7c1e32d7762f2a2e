"""A reload of files that answer slowly or never blocks no turn, and takes no longer than its caller waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import InternalError, StartFailed
from protocol.messages.cluster import Reloaded
from supervisor import deadlines
from supervisor.config import load
from supervisor.engines.kinds import read_cluster
from supervisor.files import reading
from supervisor.node.reload import reload
from supervisor.threads.file_threads import THREADS_MAX, FileThreads
from tests.rig import certificate
from tests.rig.files import read_inline
from tests.supervisor.node.reload.test_reload import FILE, KEYED, Front, front, write_keys

__all__ = ["front"]

T = TypeVar("T")


@pytest.fixture
def dead_disk_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[partial[None]]:
    """Return a function after which the disk of the file hangs, until the test is over."""
    reader, writer = os.pipe()

    def hang(path: Path) -> None:
        reading.record_path(path)
        os.read(reader, 1)
        raise StartFailed("the disk answers again")

    yield partial(monkeypatch.setattr, load, "read_text", hang)
    os.close(writer)


async def test_a_file_that_does_not_answer_blocks_no_turn_and_its_keys_can_be_revoked_all_the_same(
    front: Front, tmp_path: Path, dead_disk_after: partial[None]
) -> None:
    alices_headers = write_keys(tmp_path / "a.toml", "alice")
    readers, turns = iter([FileThreads(within_s=0.5)]), []  # the file is read first, then its keys

    async def reads(function: Callable[[], T], /) -> T:
        return await next(readers, read_inline)(function)

    node = front(text=KEYED, reads=reads)
    alice = node.gateway.keys.find(alices_headers)
    write_keys(tmp_path / "a.toml", "bob")
    dead_disk_after()

    async def serve() -> None:
        while True:
            await trio.sleep(0.01)
            turns.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        reloaded = await node.again()
        nursery.cancel_scope.cancel()
    assert len(turns) >= 20
    assert reloaded.refused == (
        f"the file changes nothing: {node.file} does not answer: nothing was read within 0.5 s",
    )
    assert alice.revoked


async def test_few_threads_wait_for_a_dead_disk_and_further_reads_are_refused(
    dead_disk_after: partial[None], tmp_path: Path
) -> None:
    dead_disk_after()
    threads = FileThreads(within_s=0.5)  # of real time

    async def read() -> None:
        with pytest.raises(StartFailed, match=r"/file does not answer: nothing was read within 0.5 s"):
            await threads(partial(read_cluster, tmp_path / "file"))

    async with trio.open_nursery() as nursery:
        for _ in range(THREADS_MAX):
            nursery.start_soon(read)
    with pytest.raises(StartFailed, match="files that were asked for earlier do not answer"):
        await threads(partial(read_cluster, tmp_path / "file"))


async def test_all_files_are_read_in_threads_before_any_value_is_applied(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        write_keys(tmp_path / f"{name}.toml", name * 4)
    lines = 'requests_max = 8\nkeys = "{0}.toml"\ntls_certificate = "{0}.pem"\ntls_key = "{0}.key"'

    counts: list[int] = []

    async def reads(function: Callable[[], T], /) -> T:
        with reading.recording_paths() as noted:
            result = await read_inline(function)
        counts.append(len(noted))
        return result

    node = front(text=FILE.replace("requests_max = 8", lines.format("a")), reads=reads)
    with reading.recording_paths() as on_the_loop:
        reloaded = await node.reload((lines.format("a"), lines.format("b")))
    assert (on_the_loop, len(reloaded.changed), len(counts)) == ([], 4, 3)
    assert all(counts)
    assert node.gateway.keys.names(admin=False) == ["bbbb"]


@pytest.fixture
def slow(front: Front) -> Callable[..., Any]:
    """Return a function that makes a node whose reads take a second each; `most` is how many ran at the same time."""

    node: Any = None

    async def reads(function: Callable[[], T], /) -> T:
        node.read.append(function)
        node.at_once += 1
        node.most = max(node.most, node.at_once)
        await trio.sleep(1)
        node.at_once -= 1
        return function()

    def make(**given: Any) -> Any:
        nonlocal node
        node = front(reads=reads, **given)
        node.read, node.at_once, node.most = [], 0, 0
        return node

    return make


async def test_reloads_run_one_after_the_other_and_requests_that_wait_share_the_next(
    slow: Callable[..., Any], autojump_clock: MockClock
) -> None:
    node, began, results = slow(), trio.current_time(), []

    async def ask() -> None:
        results.append((await node.reloader.reload(), trio.current_time() - began))

    async with node.running() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        node.file.write_text(FILE.replace("drain_s = 30", "drain_s = 3"))
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.sleep(10)
    assert (node.most, len(node.read)) == (1, 4)  # each reads the file and the keys
    assert [round(after) for _, after in results] == [2, 4, 4, 4]
    assert len({id(result) for result, _ in results[1:]}) == 1


async def test_a_reload_that_has_begun_is_completed_although_its_caller_leaves(
    slow: Callable[..., Any], tmp_path: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        write_keys(tmp_path / f"{name}.toml", name * 4)
    asked = []
    keyed = 'requests_max = 8\nkeys = "{0}.toml"'
    node = slow(text=FILE.replace("requests_max = 8", keyed.format("a")))
    node.reloader.ask_launcher = lambda: asked.append("start new nodes")
    changed = node.text.replace(keyed.format("a"), keyed.format("b")).replace("drain_s = 30", "drain_s = 4")
    node.file.write_text(changed)
    async with node.running():
        with trio.move_on_after(0.5):
            await node.reloader.reload()
        await trio.sleep(2)
    assert node.reloader.drain_s == 4
    assert (node.gateway.keys.names(admin=False), asked) == (["bbbb"], ["start new nodes"])


async def test_o_a_reload_that_waits_for_a_disk_does_not_delay_a_shutdown(
    slow: Callable[..., Any], autojump_clock: MockClock
) -> None:
    node, asked = slow(), []
    node.reloader.ask_launcher = lambda: asked.append("start new nodes")
    async with node.running() as nursery:
        nursery.start_soon(node.reloader.reload)
        await trio.sleep(1.5)
        assert len(node.read) == 2  # it reads the keys
        cancelled_at = trio.current_time()
    assert trio.current_time() - cancelled_at < 0.1
    assert (len(node.read), asked) == (2, [])


async def test_a_bug_in_a_reload_is_reported_revokes_keys_all_the_same_and_the_next_reload_works(
    front: Front,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    write_keys(tmp_path / "a.toml", "alice")
    node = front(text=KEYED)

    def bug(*_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(reload, "_apply_to_gateway", bug)
    node.file.write_text(KEYED.replace("drain_s = 30", "drain_s = 3"))
    write_keys(tmp_path / "a.toml", "carol")
    async with node.running():
        with pytest.raises(InternalError):
            await node.reloader.reload()
        assert "a bug ended a reload" in caplog.messages
        assert node.gateway.keys.names(admin=False) == ["carol"]
        monkeypatch.undo()
        node.file.write_text(KEYED)
        assert await node.reloader.reload() == Reloaded(changed=("keys: 1 are known now",))


@pytest.mark.parametrize("place", ["first", "behind another"])
async def test_o_no_reload_takes_longer_than_its_caller_waits(
    front: Front, tmp_path: Path, place: str, autojump_clock: MockClock
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key")
    lines = 'requests_max = 8\ntls_certificate = "a.pem"\ntls_key = "a.key"'

    async def hangs(_: Callable[[], object], /) -> NoReturn:
        await trio.sleep(deadlines.FILE_READ_TIMEOUT_S)
        raise StartFailed("the disk does not answer")

    node = front(text=FILE.replace("requests_max = 8", lines), reads=hangs)
    async with node.running() as nursery:
        if place != "first":
            nursery.start_soon(node.reloader.reload)
            await wait_all_tasks_blocked()
        began = trio.current_time()
        reloaded = await node.reloader.reload()
    took_s = trio.current_time() - began
    assert len(reloaded.refused) == 3  # the file, the keys, the certificate
    most_s = deadlines.RELOAD_MAX_S if place == "first" else deadlines.RELOAD_QUEUED_MAX_S
    assert 0.8 * most_s < took_s <= most_s
    assert took_s + deadlines.WAY_S <= deadlines.RELOAD_ANSWER_TIMEOUT_S
