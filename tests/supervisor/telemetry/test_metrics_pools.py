"""Calls to pools are counted by outcome, and those for which another pool stood in."""

from __future__ import annotations

from supervisor.observers import RoutingMetrics
from supervisor.telemetry.metrics import Metrics
from tests.rig.routed_pools import pair_levels


def test_a_call_counts_for_the_pool_of_its_worker() -> None:
    metrics = Metrics()
    observer = RoutingMetrics(metrics, "tiny", pair_levels())
    for worker, outcome in (("pq", "ended"), ("p1", "left"), ("p2", "left"), ("stray", "ended")):
        observer.call_ended(worker, outcome)
    observer.diverted("p-cheap", "p-quick")
    text = metrics.render({}).decode()
    assert 'espalier_pool_requests_total{outcome="ended",pool="p-quick"} 1.0' in text
    assert 'espalier_pool_requests_total{outcome="left",pool="p-cheap"} 2.0' in text
    assert 'espalier_pool_diversions_total{actual="p-quick",pool="p-cheap"} 1.0' in text
    assert text.count("espalier_pool_requests_total{") == 2
