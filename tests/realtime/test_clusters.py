"""What `bench.chaos` and `bench.rolling` prove at length, once each and short: real processes, links and signals."""

from __future__ import annotations

from random import Random
from signal import SIGKILL

import pytest

from bench import rolling
from bench._cluster import cluster
from bench._cutter import Cutter
from bench._node import place

pytestmark = pytest.mark.realtime

CLIENTS = 8


@pytest.fixture
def folder():
    with place() as made:
        yield made


def test_a_worker_drains_and_comes_back_under_load_and_nobody_notices(folder):
    with cluster(folder, rolling.plan(drain_s=0.5)) as of:
        with rolling.steady(of, CLIENTS, seed=1) as tally:
            took = rolling.renew(of, "w1")
        assert took["drained"] < 5.0
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert not of.wait_idle(10.0)
        assert not of.stop(10.0)


def test_answers_go_on_elsewhere_when_a_worker_is_killed_and_a_link_is_cut(folder):
    cutters = []

    def behind_cutter(of):
        cutters.append(Cutter(of.links["w2"]))
        of.doors["w2"] = cutters[0].port

    with cluster(folder, rolling.plan(drain_s=0.5), before=behind_cutter) as of:
        with rolling.steady(of, CLIENTS, seed=1) as tally:
            assert cutters[0].cut(Random(1), reset=True)
            of.wait_ready(30.0)
            of.nodes["w1"].signal(SIGKILL)
            of.nodes["w1"].process.wait(5)
            of.start("w1")
            of.wait_ready(30.0)
        assert not tally.bad
        assert tally.counts["whole"] == tally.requests >= CLIENTS
        assert not of.wait_idle(10.0)
        assert not of.stop(10.0)
        cutters[0].close()
