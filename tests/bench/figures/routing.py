"""Results of routing with few figures, for tests of what is made of them."""

from __future__ import annotations

from bench.figures.routing_data import ClusterRun, PolicyFigures, PolicyRun, RoutingData, ScaleRun
from bench.figures.routing_tables import (
    ALL_CPU,
    BLOCK_BYTES,
    BLOCK_CPU,
    BLOCKS,
    CHANGED,
    GATEWAY_BYTES,
    GATEWAY_CPU,
    IDLE,
    OTHERS,
    OWN,
    TURNS,
    WORKER_BYTES,
)


def policy(*hit_share: float, predicted: float = 0) -> PolicyFigures:
    return PolicyFigures(hit_share, [100.4], [300], [], predicted - 1 if predicted else 0, predicted)


def scale(workers: int, p99_us: float) -> ScaleRun:
    figures = {"decision_us": 90.6, "decision_p50_us": 80.0, "decision_p99_us": p99_us}
    return ScaleRun(
        {"workers": workers, "requests": 100 * workers},
        {**figures, "index_blocks": 510.0 * workers, "told_blocks_s": 1644.0 * workers, "most_shares": 1.08},
    )


def cluster(workers: int) -> ClusterRun:
    figures = {"links of a worker": 1.0, "a routing decision, ms": 0.0281}
    for period, bytes_s in ((IDLE, 12), (OWN, 12), (OTHERS, 200), (BLOCKS, 5400)):
        figures |= {
            f"{period}: {WORKER_BYTES}": bytes_s,
            f"{period}: {GATEWAY_BYTES}": bytes_s * workers,
            f"{period}: {ALL_CPU}": 0.0021 * workers,
            f"{period}: {GATEWAY_CPU}": 0.00104 * workers,
            f"{period}: {TURNS}": 18.0 * workers,
        }
    figures |= {
        f"{BLOCKS}: {CHANGED}": 512.0 * workers,
        f"{BLOCKS}: {BLOCK_BYTES}": 10.54,
        f"{BLOCKS}: {BLOCK_CPU}": 2.21,
    }
    return ClusterRun(workers, figures)


DATA = RoutingData(
    [scale(10, 163.0), scale(100, 216.0), scale(1000, 288.0)],
    [cluster(10), cluster(100), cluster(1000)],
    [
        PolicyRun("sglang", 2, 3, {"paced": {"round_robin": policy(0.3, 0.4, 0.9), "kv": policy(0.8, predicted=200)}}),
        PolicyRun("sglang", 3, 1, {"paced": {"kv": policy(0.7), "one engine": policy(0.75)}}),
    ],
)
