"""A host's watchdog ends its process group and removes its folder, whatever has gone, also when its log is not read."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rig.node import ROOT

pytestmark = pytest.mark.realtime

WITHIN_S = 30.0  # where it would else sleep for a minute
HOST = """
import os, subprocess, sys, time
from pathlib import Path
from actors.engines.host.watchdog import start_watchdog
watchdog = start_watchdog(Path(sys.argv[3]), int(sys.argv[1]), int(sys.argv[2]))
child = subprocess.Popen(["sleep", "60"])
watchdog.watch_child(child.pid)
print(child.pid, flush=True)
time.sleep(60)
"""


class Guarded:
    """A process with a watchdog, its child, and everything that is watched."""

    def __init__(self, stack: ExitStack[bool | None], folder: Path) -> None:
        self.ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        self.node = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(self.node.kill)
        pidfd = os.pidfd_open(self.node.pid)
        stack.callback(os.close, pidfd)
        self.host = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", HOST, str(theirs.fileno()), str(pidfd), str(folder)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), pidfd),
                start_new_session=True,
            )
        )
        stack.callback(self.host.kill)
        assert self.host.stdout is not None
        child = int(self.host.stdout.readline())
        self.child = os.pidfd_open(child)
        stack.callback(os.close, self.child)
        theirs.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "e"
    path.mkdir()
    return path


@pytest.fixture
def watched(folder: Path) -> Iterator[Guarded]:
    with ExitStack() as stack:
        yield Guarded(stack, folder)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("gone", ["link", "node"])
def test_a_watchdog_ends_its_group_and_removes_its_folder_even_when_its_log_is_not_read(
    watched: Guarded, folder: Path, gone: str, read: bool
) -> None:
    if not read:
        assert watched.host.stderr is not None
        watched.host.stderr.close()
    if gone == "link":
        watched.ours.close()
    else:
        watched.node.kill()
    assert watched.host.wait(WITHIN_S) == -signal.SIGKILL
    assert not folder.exists()
    ended = select.poll()
    ended.register(watched.child, select.POLLIN)
    assert ended.poll(1000 * WITHIN_S)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_a_watchdog_names_the_signal_that_killed_a_child(watched: Guarded, number: signal.Signals, name: str) -> None:
    signal.pidfd_send_signal(watched.child, number)
    assert watched.host.wait(WITHIN_S) == -signal.SIGKILL
    assert watched.host.stderr is not None
    (line,) = watched.host.stderr.read().decode().splitlines()
    assert line.startswith("host ends: the engine's process ")
    assert line.endswith(f" has ended, killed by {name}")
