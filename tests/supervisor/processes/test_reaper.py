"""Processes that end: who reaps them, when, and with how little."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from actors.engines.sglang.boot_message import BootMessage
from protocol.errors import StartFailed
from supervisor.engines.sglang import spawn
from supervisor.processes import reaper
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder, Process, start
from supervisor.supervision.registration import Registration

pytestmark = pytest.mark.realtime

LADDER = Ladder(stop_s=0.1, term_s=0.5, kill_s=5.0)
FORKS = """
import errno, os, signal, sys
from actors.engines.sglang.host import zygote
zygote._import_everything = lambda: None
zygote._become_host = lambda message, fds: os._exit(0)
fork, full = os.fork, [None] * {full}
def limited():
    if full:
        full.pop()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = limited
zygote.main()
"""


def state(pid) -> str | None:
    """Z for a process that has ended and is not reaped, None for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def gone(pid) -> None:
    while state(pid) is not None:  # noqa: ASYNC110
        await trio.sleep(0.01)  # nobody tells when somebody else reaps it


async def test_b6_children_are_reaped_though_no_descriptor_is_left() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reaper.run)
        await trio.testing.wait_all_tasks_blocked()
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})  # noqa: ASYNC221
        with no_descriptors(), trio.fail_after(10), pytest.raises(ChildProcessError):
            while True:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: ASYNC222
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def ended(tmp_path: Path) -> Process:
    with (tmp_path / "log").open("wb") as log:
        return start("it", [sys.executable, "-c", ""], {}, [], log.fileno())


async def test_b18_a_process_is_reaped_by_its_owner_alone_until_it_is_closed(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reaper.run)
            process = ended(tmp_path)
            await process.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert state(process.pid) == "Z"  # the id of its group is still its own
            await process.stop(LADDER, GracePeriods())
            assert state(process.pid) is None
            nursery.cancel_scope.cancel()


@contextmanager
def given(tmp_path: Path) -> Iterator[spawn.Descriptors]:
    """What a host inherits."""
    with (tmp_path / "log").open("wb") as log:
        yield spawn.Descriptors(log.fileno(), log.fileno(), log.fileno(), log.fileno())


@pytest.fixture
def run_zygote(tmp_path: Path) -> Callable[..., Awaitable[None]]:
    async def run(plug, full, *, task_status) -> None:
        command = (sys.executable, "-c", FORKS.format(full=full))
        chatter = OutputLog(tmp_path / "zygote.log")
        await spawn.zygote(plug, chatter, GracePeriods(), LADDER, dict(os.environ), command, task_status=task_status)

    return run


async def test_b18_a_zygote_keeps_the_id_of_a_host_until_its_node_has_done_with_it(
    tmp_path: Path, run_zygote: Callable[..., Awaitable[None]]
) -> None:
    plug = Registration()
    with trio.fail_after(20), given(tmp_path) as descriptors:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(run_zygote, plug, 0))
            for _ in range(3):
                process = await plug.current.fork(BootMessage("e", str(tmp_path), {}, {}), descriptors)
                await process.wait()
                assert state(process.pid) == "Z"
                await process.stop(LADDER, GracePeriods())
                await gone(process.pid)
            nursery.cancel_scope.cancel()


async def test_b6_a_fork_that_fails_is_one_failed_start_and_the_zygote_lives(
    tmp_path: Path, run_zygote: Callable[..., Awaitable[None]]
) -> None:
    plug, boot = Registration(), BootMessage("e", str(tmp_path), {}, {})
    with trio.fail_after(20), given(tmp_path) as descriptors:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(run_zygote, plug, 2))
            for _ in range(2):
                with pytest.raises(StartFailed, match=r"^the zygote could not fork a host: Resource temporarily"):
                    await plug.current.fork(boot, descriptors)
            process = await plug.current.fork(boot, descriptors)
            await process.stop(LADDER, GracePeriods())
            nursery.cancel_scope.cancel()


async def test_b6_a_host_that_cannot_be_watched_is_one_failed_start_and_not_left_behind(
    tmp_path: Path, run_zygote: Callable[..., Awaitable[None]]
) -> None:
    plug, boot = Registration(), BootMessage("e", str(tmp_path), {}, {})
    with trio.fail_after(20), given(tmp_path) as descriptors:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(run_zygote, plug, 0))
            with no_descriptors(), pytest.raises(OSError, match="no descriptor is left to watch a host by"):
                await plug.current.fork(boot, descriptors)
            process = await plug.current.fork(boot, descriptors)
            await process.stop(LADDER, GracePeriods())
            nursery.cancel_scope.cancel()


async def test_a_wait_for_a_zygote_that_cannot_start_fails_with_the_reason() -> None:
    plug = Registration()
    fork = spawn.fork_starter(plug)
    async with trio.open_nursery() as nursery:

        async def waits() -> None:
            with pytest.raises(StartFailed, match=r"^the zygote could not import SGLang: no torch$"):
                await fork(BootMessage("e", "", {}, {}), spawn.Descriptors(0, 0, 0, 0))

        nursery.start_soon(waits)
        await trio.testing.wait_all_tasks_blocked()
        plug.note_failure("the zygote could not import SGLang: no torch", 1.0)
