"""Processes that end: by whom they are reaped and when, also without a descriptor left."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from actors.engines.sglang.boot_message import BootMessage
from protocol.errors import StartFailed
from supervisor.engines.host.spawn import Descriptors
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


def state(pid: int) -> str | None:
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


async def gone(pid: int) -> None:
    while state(pid) is not None:  # noqa: ASYNC110
        await trio.sleep(0.01)  # nobody tells when somebody else reaps it


async def test_children_are_reaped_though_no_descriptor_is_left(nursery: trio.Nursery) -> None:
    nursery.start_soon(reaper.run)
    await trio.testing.wait_all_tasks_blocked()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})  # noqa: ASYNC221
    with no_descriptors(), trio.fail_after(60), pytest.raises(ChildProcessError):
        while True:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: ASYNC222
            await trio.sleep(0.01)


def ended(tmp_path: Path) -> Process:
    with (tmp_path / "log").open("wb") as log:
        return start("it", [sys.executable, "-c", ""], {}, [], log.fileno())


async def test_a_process_is_reaped_by_its_owner_alone_until_it_is_closed(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reaper.run)
            process = ended(tmp_path)
            await process.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert state(process.pid) == "Z"  # the id of its group is still its own
            await process.stop(LADDER, GracePeriods())
            assert state(process.pid) is None
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def zygote(tmp_path: Path, forks_refused: int = 0) -> AsyncIterator[Callable[[], Awaitable[Process]]]:
    """Run a zygote whose first forks are refused, and yield a function that has it fork a host."""
    registration: Registration[spawn.Zygote] = Registration()
    command = (sys.executable, "-c", FORKS.format(full=forks_refused))
    output_log, environment = OutputLog(tmp_path / "zygote.log"), dict(os.environ)
    run = partial(spawn.zygote, registration, output_log, GracePeriods(), LADDER, environment, command)
    with trio.fail_after(90), (tmp_path / "log").open("wb") as log:
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            assert registration.current is not None
            descriptors = Descriptors(*[log.fileno()] * 4)
            yield partial(registration.current.fork, BootMessage("e", str(tmp_path), {}, {}), descriptors)
            nursery.cancel_scope.cancel()


async def test_a_zygote_keeps_the_id_of_a_host_until_its_node_has_done_with_it(tmp_path: Path) -> None:
    async with zygote(tmp_path) as fork:
        for _ in range(3):
            process = await fork()
            await process.wait()
            assert state(process.pid) == "Z"
            await process.stop(LADDER, GracePeriods())
            await gone(process.pid)


async def test_a_fork_that_fails_is_one_failed_start_and_the_zygote_lives(tmp_path: Path) -> None:
    async with zygote(tmp_path, forks_refused=2) as fork:
        for _ in range(2):
            with pytest.raises(StartFailed, match=r"^the zygote could not fork a host: Resource temporarily"):
                await fork()
        await (await fork()).stop(LADDER, GracePeriods())


async def test_a_host_that_cannot_be_watched_is_one_failed_start_and_not_left_behind(tmp_path: Path) -> None:
    async with zygote(tmp_path) as fork:
        with no_descriptors(), pytest.raises(OSError, match="no descriptor is left to watch a host by"):
            await fork()
        await (await fork()).stop(LADDER, GracePeriods())
