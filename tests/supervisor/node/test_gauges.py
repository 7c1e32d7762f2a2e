"""A scrape of a large cluster takes many turns of the event loop, and its text is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.link.peer import Peer
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Usage
from supervisor.cluster.directory import Directory
from supervisor.cluster.node_records import NodeSnapshot
from supervisor.links.link import Link
from supervisor.links.traffic import Traffic
from supervisor.node import gauges
from supervisor.observers import RoutingMetrics
from supervisor.telemetry.metrics import Metrics
from supervisor.telemetry.registry import SAMPLES_PER_PIECE, SECONDS, render

NODES = [f"node-{number:03}" for number in range(1_000)]
LOADS = {f"{node}/tiny-0": EngineLoad(1, 2, 3) for node in NODES}
OF_HISTOGRAM = len(SECONDS) + 3  # samples of one of its labels: the buckets, their sum and their count


@pytest.fixture
def metrics() -> Metrics:
    """Return the metrics of a gateway of a thousand nodes."""
    metrics = Metrics()
    for node in NODES:
        RoutingMetrics(metrics, "tiny").call_ended(f"{node}/tiny-0", "stop")
    for number in range(100):
        metrics.request_ended(f"model-{number}", "http", "stop", 1.0, Usage(1, 1, 0))
    link = cast("Link", SimpleNamespace(silent_s=1.0, peer=Peer("back", serves_max=1)))
    directory = SimpleNamespace(nodes=dict.fromkeys(NODES, NodeSnapshot(link=link)), should_link=lambda _: True)
    traffic = {node: Traffic() for node in NODES}
    gauges.add_link_metrics(metrics.registry, cast("Directory", directory), traffic)
    gauges.add_engine_up(metrics.registry, lambda: dict.fromkeys(LOADS, 1.0))
    return metrics


def test_a_piece_of_a_scrape_has_few_samples_however_large_the_cluster(metrics: Metrics) -> None:
    pieces = list(render(metrics.families(LOADS)))
    assert max(piece.count(b"\n") for piece in pieces) <= SAMPLES_PER_PIECE + OF_HISTOGRAM + 2
    text = b"".join(pieces)
    assert text == metrics.render(LOADS)
    families = list(text_string_to_metric_families(text.decode()))
    sizes = {family.name: len(family.samples) for family in families}
    assert text.count(b"# TYPE ") == text.count(b"# HELP ") == len(sizes) == len(families)  # each once
    of_nodes = {name for name, size in sizes.items() if size == len(NODES)}
    links = {f"espalier_link_{name}" for name in ("up", "silence_seconds", "queued_bytes", "stream_waits")}
    assert links | {"espalier_worker_calls", "espalier_engine_up", "espalier_engine_running"} <= of_nodes
    twice = {f"espalier_link_{name}" for name in ("streams", "bytes", "messages", "attached_bytes")}
    assert {sizes[name] for name in twice} == {2 * len(NODES)}
    assert sizes["gen_ai_server_request_duration_seconds"] == 100 * OF_HISTOGRAM
    assert all(family.documentation and family.type != "unknown" for family in families)
