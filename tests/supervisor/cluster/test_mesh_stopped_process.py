"""A process that is stopped, and does not end, is lost to its peers, and linked again."""

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

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]

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


SILENT_S = 5.0  # longer than a busy machine lets a process stand still


async def test_a_stopped_process_is_lost_and_comes_back(
    other: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    a = Node("a", section=evolve(QUICK, silent_s=SILENT_S, stalled_s=SILENT_S))
    async with linked_nodes(a):
        process = other(a.address)
        await until(lambda: "b" in a.linked and len(a.directory.workers("oak")) == 2)
        await trio.sleep(1.5 * SILENT_S)
        assert a.linked == {"b"}  # it is alive, and nothing was sent but heartbeats
        link = a.directory.nodes["b"].link
        assert link is not None
        os.kill(process.pid, signal.SIGSTOP)
        await trio.sleep(SILENT_S / 5)
        assert not link.lost
        await until(lambda: link.lost)
        await until(lambda: a.linked == set() and len(a.directory.workers("oak")) == 1)  # a turn later
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: "b" in a.linked and len(a.directory.workers("oak")) == 2)
