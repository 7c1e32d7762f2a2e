"""A process that is stopped, and does not end, is lost to its peers in time, and linked again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from attrs import evolve

from tests.rig.nodes import QUICK, Node, linked_nodes, until

pytestmark = pytest.mark.realtime

ROOT = Path(__file__).parents[3]

OTHER = """
import sys, trio
from tests.rig.nodes import Node
async def main():
    node = Node("b", join=(sys.argv[1],))
    await node.run()
trio.run(main)
"""


@pytest.fixture
def other() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started = []

    def start(at: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", OTHER, at], cwd=ROOT)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


async def test_a_stopped_process_is_lost_within_stalled_s_and_comes_back(
    other: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    a = Node("a", section=evolve(QUICK, stalled_s=QUICK.silent_s))
    async with linked_nodes(a):
        process = other(a.address)
        await until(lambda: "b" in a.linked and len(a.directory.workers("oak")) == 2, within_s=20.0)
        await trio.sleep(3 * QUICK.silent_s)
        assert a.linked == {"b"}  # it is alive, and nothing was sent but heartbeats
        link = a.directory.nodes["b"].link
        assert link is not None
        os.kill(process.pid, signal.SIGSTOP)
        stopped_at = trio.current_time()
        await until(lambda: link.lost)
        took_s = trio.current_time() - stopped_at
        assert QUICK.silent_s - QUICK.heartbeat_s - 0.05 <= took_s <= QUICK.silent_s + 0.25
        await until(lambda: a.linked == set() and len(a.directory.workers("oak")) == 1)  # a turn later
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: "b" in a.linked and len(a.directory.workers("oak")) == 2)
