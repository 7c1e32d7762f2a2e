"""A controlled process has a socket to its node and is told who that is; a start that fails leaves nothing open."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from supervisor.processes.controlled import start_controlled
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from tests.rig.media import open_descriptors

LADDER = Ladder(stop_s=0.1, term_s=0.1, kill_s=1.0)
ANSWERS = """
import os, socket, sys
control = socket.socket(fileno=int(sys.argv[-2]))
print("begun", flush=True)
control.send(f"{sys.argv[-1]} {os.getppid()}".encode())
control.send(control.recv(100))
"""


@pytest.fixture
def output_log(tmp_path: Path) -> OutputLog:
    return OutputLog(tmp_path / "controlled.log")


@pytest.mark.realtime
async def test_a_controlled_process_answers_by_its_socket_packet_by_packet(output_log: OutputLog) -> None:
    started = start_controlled("a child", (sys.executable, "-c", ANSWERS), {}, output_log)
    try:
        with trio.fail_after(60), started.control:
            await started.control.send(b"one")
            assert await started.control.recv(100) == f"{os.getpid()} {os.getpid()}".encode()
            assert await started.control.recv(100) == b"one"
            await output_log.copy_from(started.output)  # to its end: no other process has its pipe
    finally:
        await started.process.stop(LADDER, GracePeriods())  # noqa: ASYNC102  # shielded, rung by rung
    assert list(output_log.tail) == ["begun"]


async def test_a_start_that_fails_leaves_no_descriptor_open(output_log: OutputLog) -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        start_controlled("a child", ("/no/such/program",), {}, output_log)
    assert open_descriptors() == before
