"""A node's process stands still for longer than `silent_s`, and goes on: real kernels, links and signals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from bench.faults import rolling
from bench.faults.rolling import Load
from bench.rig.cluster import Cluster, Plan, cluster, cluster_engine_name, simulated
from bench.rig.node import Node, wait_until

pytestmark = pytest.mark.realtime

CLIENTS = 8
WITHIN_S = 90.0
SILENCE = "heartbeat_s = 0.5\nsilent_s = 6.0\nstalled_s = 300.0\n"  # a busy machine's own pauses are shorter
MOVED = "espalier_resumes_total"
STILL, HEARD = "a node stands still", "a node that stood still is heard again"


def long_answers() -> Plan:
    """Two workers of which each has answers under way at any time."""
    texts = {
        name: simulated(name, slots=4 * CLIENTS, costs=rolling.COSTS, length_min=150, length_max=180)
        for name in ("w1", "w2")
    }
    return Plan(texts, SILENCE, drain_s=0.5, front_drain_s=rolling.FRONT_DRAIN_S)


def begin(target: Cluster, tally: Load) -> None:
    """Wait until clients have been answered and have asked again, by both workers."""

    def under_way() -> bool:
        counts = [target.counts(name) for name in target.workers]
        return tally.requests >= CLIENTS and all(count is not None and count["running"] > 0 for count in counts)

    assert wait_until(under_way, WITHIN_S, every_s=0.05) is not None


def stopped(node: Node, noticed: Callable[[], bool]) -> None:
    """Let a node's process stand still until that is noticed, and go on."""
    node.signal(SIGSTOP)
    try:
        assert wait_until(noticed, WITHIN_S, every_s=0.05) is not None
    finally:
        node.signal(SIGCONT)


@pytest.mark.nightly
def test_streams_continue_after_the_gateways_process_was_stopped(folder: Path) -> None:
    with cluster(folder, long_answers()) as target:
        before = {name: len(target.nodes[name].output()) for name in target.workers}

        def all_have_logged(event: str) -> bool:
            return all(event in target.nodes[name].output()[before[name] :] for name in target.workers)

        with rolling.steady(target, CLIENTS, seed=1) as tally:
            begin(target, tally)
            stopped(target.front, lambda: all_have_logged(STILL))
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert target.front.metric(MOVED) == 0
        assert all_have_logged(HEARD)
        assert not any("no link" in target.nodes[name].output()[before[name] :] for name in target.workers)
        assert not target.wait_idle(WITHIN_S)
        assert not target.stop(WITHIN_S)


@pytest.mark.nightly
def test_streams_move_from_a_stopped_worker_which_is_used_again_afterwards(folder: Path) -> None:
    with cluster(folder, long_answers()) as target:
        before = len(target.front.output())
        with rolling.steady(target, CLIENTS, seed=1) as tally:
            begin(target, tally)
            stopped(target.nodes["w1"], lambda: STILL in target.front.output()[before:])
            target.wait_ready()
            so_far = answered_by(target, "w1")
            assert wait_until(lambda: answered_by(target, "w1") > so_far, WITHIN_S, every_s=0.05) is not None
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert target.front.metric(MOVED, code="link_lost") > 0
        assert "no link" not in target.front.output()[before:]
        assert not target.wait_idle(WITHIN_S)
        assert not target.stop(WITHIN_S)


def answered_by(target: Cluster, worker: str) -> float:
    """Return how many calls a worker has answered to the end."""
    name = cluster_engine_name(worker)
    return target.front.metric("espalier_worker_calls_total", worker=name, outcome="ended")
