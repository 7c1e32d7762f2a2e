"""Failures beside a stream: it is never cut, and does not wait for what has failed to be back."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from bench.rig.clients import Chat, Outcome, chat_body
from bench.rig.node import ROOT, Node, free_ports, wait_until
from bench.rig.processes import cpu_s, open_files
from tests.rig.launched import check_exit, running_launcher, wait_ready

pytestmark = pytest.mark.realtime

WITHIN_S = 90.0
GAP_S = 10.0  # between two tokens: longer than a busy machine lets a process stand still
CLUSTER = """\
[node.main]
drain_s = 60.0
[gateway]
port = {port}
{gateway}
[model.good]
path = "{tiny}"
[model.bad]
path = "{tiny}"
[engine.good-0]
model = "good"
kind = "simulated"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.05
[engine.bad-0]
model = "bad"
kind = "simulated"
kv_tokens_max = 65536
{bad}
"""


class TimedChat(Chat):
    """A stream that records when its tokens come."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        super().__init__(port, body)
        self.times: list[float] = []

    def _count(self, event: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())
        super()._count(event)


class Honest:
    """One client that streams and records when its tokens come."""

    def __init__(self, port: int, tokens: int) -> None:
        self.outcome: Outcome | None = None
        self.chat = TimedChat(port, chat_body("Tell me about the oak", tokens, model="good"))
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        self.outcome = self.chat.read()

    def check(self) -> None:
        """Wait for the end: the answer is whole, and nothing has held it."""
        self.thread.join(WITHIN_S)
        assert self.outcome is not None
        assert self.outcome.whole, self.outcome
        gaps = [after - before for before, after in zip(self.chat.times, self.chat.times[1:], strict=False)]
        assert max(gaps) < GAP_S, max(gaps)


def served(folder: Path, bad: str = "", gateway: str = "") -> AbstractContextManager[Node]:
    (port,) = free_ports(1)
    return running_launcher(
        folder, CLUSTER.format(port=port, bad=bad, gateway=gateway, tiny=ROOT / "examples" / "tiny"), port
    )


def get(target: Node, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_an_engine_that_crashes_again_and_again_affects_no_other_client(folder: Path) -> None:
    with served(folder, "simulated.faults.crash_after_s = 0.3") as target:
        wait_ready(target)
        honest = Honest(target.port, 100)  # five seconds, of which four restarts take two
        assert wait_until(
            lambda: target.metric("espalier_child_restarts_total", child="main/bad-0/engine") >= 4, WITHIN_S
        )
        answers = []
        wait_until(lambda: answers.append(get(target, "/ready")) or "failed" in answers[-1][1], WITHIN_S, every_s=0.05)  # type: ignore[func-returns-value]
        status, why = answers[-1]
        assert status == 503
        assert "engine bad-0 failed: " in why, why
        assert "next try " in why, why
        honest.check()
        target.signal(signal.SIGTERM)
        check_exit(target)


@pytest.mark.nightly
def test_one_engine_that_cannot_start_ends_neither_its_node_nor_its_neighbours(folder: Path) -> None:
    """It crashes as it starts, before anything else of the node is up."""
    with served(folder, "simulated.faults.crash_after_s = 0.000001") as target:
        assert wait_until(lambda: "main/good-0 is ready" in target.output(), WITHIN_S) is not None, target.output()
        honest = Honest(target.port, 40)
        honest.check()
        target.signal(signal.SIGTERM)
        check_exit(target)


def test_without_descriptors_connections_are_refused_and_nothing_else_happens(folder: Path) -> None:
    with served(folder, "simulated.faults.crash_after_s = 2.0") as target:
        wait_ready(target)
        honest = Honest(target.port, 120)
        pid, connections = target.process.pid, []
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
        try:
            for _ in range(100):  # more than there are descriptors; the kernel's queue takes the rest
                connection = socket.create_connection(("127.0.0.1", target.port), timeout=WITHIN_S)
                connections.append(connection)
            assert wait_until(lambda: open_files(pid) >= 60, WITHIN_S) is not None
            before = cpu_s(pid)
            os.kill(pid, signal.SIGCHLD)  # as if a child had ended
            restarts = target.output().count('"main/bad-0/engine is ready')
            again = wait_until(lambda: target.output().count('"main/bad-0/engine is ready') >= restarts + 1, WITHIN_S)
            assert again is not None, "an engine that crashes is started again"
            assert "no file descriptors are left" in target.output()
            honest.check()
            assert cpu_s(pid) - before < 3.0, "nobody spins"
        finally:
            for connection in connections:
                connection.close()
        assert wait_until(lambda: get(target, "/health")[0] == 200, WITHIN_S) is not None
        target.signal(signal.SIGTERM)
        check_exit(target)
