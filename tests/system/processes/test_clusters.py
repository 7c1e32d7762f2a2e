"""Restarts, losses and signals in a cluster under load, with real processes, links and signals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM

import pytest

from bench.faults import rolling
from bench.faults.proxy import FaultProxy
from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.cluster import FRONT, Cluster, Plan, cluster
from bench.rig.node import ROOT, Node, wait_until
from tests.rig.launched import simulated_launcher, wait_ready

pytestmark = pytest.mark.realtime

CLIENTS = 8
WITHIN_S = 90.0
DRAIN_S = 300.0  # far more than any test takes


def patient_plan(drain_s: float, tokens_max: int = 160) -> Plan:
    """Two workers that are not lost because a busy machine lets them stand still for a few seconds."""
    return replace(rolling.plan(drain_s, tokens_max=tokens_max), cluster="silent_s = 8.0\n")


@pytest.mark.nightly
def test_a_worker_is_restarted_under_load_and_every_answer_is_whole(folder: Path) -> None:
    with cluster(folder, patient_plan(drain_s=0.5, tokens_max=80)) as target:
        with rolling.steady(target, CLIENTS, seed=1) as tally:
            rolling.restart(target, "w1", WITHIN_S)
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert not target.wait_idle(WITHIN_S)
        assert not target.stop(WITHIN_S)


def test_answers_continue_on_another_worker_when_one_is_killed_and_a_link_is_cut(folder: Path) -> None:
    cutters = []

    def behind_cutter(target: Cluster) -> None:
        cutters.append(FaultProxy(target.link_ports["w2"]))
        target.dialed_ports["w2"] = cutters[0].port

    with cluster(folder, patient_plan(drain_s=0.5, tokens_max=80), before=behind_cutter) as target:
        with rolling.steady(target, CLIENTS, seed=1) as tally:
            connection = cutters[0].choose(Random(1))
            assert connection is not None
            connection.cut(reset=True)
            target.wait_ready()
            target.nodes["w1"].signal(SIGKILL)
            target.nodes["w1"].process.wait(WITHIN_S)
            target.start("w1")
            target.wait_ready()
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert not target.wait_idle(WITHIN_S)
        assert not target.stop(WITHIN_S)
        cutters[0].close()


# A signal after a drain ------------------------------------------------------------------


@contextmanager
def drained(target: Cluster, name: str) -> Iterator[None]:
    """Drain a node by the command while the body runs; the command reports its end."""
    command = [sys.executable, "-m", "supervisor", str(target.folder / name / "cluster.toml"), "drain", name]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as operator:
        try:
            yield
            output, _ = operator.communicate(timeout=WITHIN_S)
            assert (operator.returncode, f"Node {name} has gone." in output) == (0, True), output
        finally:
            operator.kill()


def signalled_once_it_says(node: Node, text: str) -> int | None:
    """Send SIGTERM as soon as a node has logged this; return its exit code, once it has ended."""
    node.observe()
    assert wait_until(lambda: text in node.output(), WITHIN_S, every_s=0.001) is not None
    node.signal(SIGTERM)
    assert node.wait_exit(WITHIN_S) is not None
    return node.process.returncode


@pytest.mark.parametrize("event", ["draining", "stopped"])
@pytest.mark.nightly
def test_a_signal_to_a_drained_node_ends_it_with_0_long_before_its_drain_would(folder: Path, event: str) -> None:
    with cluster(folder, patient_plan(drain_s=DRAIN_S)) as target, drained(target, "w1"):
        code = signalled_once_it_says(target.nodes["w1"], f'"event": "{event}"')
        assert (code, target.nodes["w1"].leftovers()) == (0, [])


@pytest.mark.nightly
def test_a_signal_to_a_draining_node_truncates_no_answer(folder: Path) -> None:
    with cluster(folder, patient_plan(drain_s=DRAIN_S)) as target:
        chat = Chat(target.front.port, chat_body("Tell me a long story", 60, stream_options={"include_usage": True}))
        answer = BackgroundReader(chat.read)
        assert wait_until(lambda: chat.outcome.first_at, WITHIN_S) is not None
        with drained(target, FRONT):
            code = signalled_once_it_says(target.front, '"event": "draining"')
        outcome = answer.wait(WITHIN_S)
        assert outcome.usage is not None
        assert (code, outcome.whole, outcome.usage["completion_tokens"]) == (0, True, 60)


@pytest.mark.nightly
def test_a_signal_to_a_launcher_that_has_ended_its_nodes_ends_it_with_0(folder: Path) -> None:
    with simulated_launcher(folder) as target:
        wait_ready(target)
        target.signal(SIGTERM)
        code = signalled_once_it_says(target, '"level": "info", "event": "stopped"')  # its own: no node's
        assert (code, target.leftovers()) == (0, [])
