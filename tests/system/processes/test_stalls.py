"""A node's process stands still for longer than `silent_s`, and goes on: real kernels, links and signals."""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from bench import rolling
from bench.rig.cluster import Plan, cluster, simulated
from bench.rig.node import Node

pytestmark = pytest.mark.realtime

CLIENTS = 8
STANDS_STILL_S = 4.0
QUICK = "heartbeat_s = 0.25\nsilent_s = 2.0\n"
MOVED = "espalier_resumes_total"


def long_answers() -> Plan:
    """Two workers whose answers take longer than a node stands still."""
    texts = {
        name: simulated(name, slots=4 * CLIENTS, costs=rolling.COSTS, length_min=150, length_max=180)
        for name in ("w1", "w2")
    }
    return Plan(texts, QUICK, drain_s=0.5, front_drain_s=rolling.FRONT_DRAIN_S)


def stopped(node: Node) -> None:
    """Let a node's process stand still, and go on."""
    node.signal(SIGSTOP)
    time.sleep(STANDS_STILL_S)
    node.signal(SIGCONT)


def test_d8_streams_continue_after_the_gateways_process_was_stopped(folder: Path) -> None:
    with cluster(folder, long_answers()) as target:
        before = {name: len(target.nodes[name].output()) for name in target.workers}
        with rolling.steady(target, CLIENTS, seed=1) as tally:
            time.sleep(1.0)
            stopped(target.front)
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert target.front.metric(MOVED) == 0
        for name in target.workers:
            output = target.nodes[name].output()[before[name] :]
            assert "a node stands still" in output
            assert "a node that stood still is heard again" in output
            assert "no link" not in output
        assert not target.wait_idle(10.0)
        assert not target.stop(10.0)


def test_d8_streams_move_from_a_stopped_worker_which_is_used_again_afterwards(folder: Path) -> None:
    with cluster(folder, long_answers()) as target:
        before = len(target.front.output())
        with rolling.steady(target, CLIENTS, seed=1) as tally:
            time.sleep(1.0)
            stopped(target.nodes["w1"])
            target.wait_ready(10.0)
            asked = target.front.metric("espalier_link_messages_total", peer="w1", direction="received")
            time.sleep(2.0)
            assert (
                target.front.metric("espalier_link_messages_total", peer="w1", direction="received") > asked + CLIENTS
            )
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert target.front.metric(MOVED, code="link_lost") > 0
        assert "no link" not in target.front.output()[before:]
        assert not target.wait_idle(10.0)
        assert not target.stop(10.0)
