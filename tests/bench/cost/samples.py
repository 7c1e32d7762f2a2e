"""Samples of loads that nobody ran, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping

from bench.cost.accounts import Spent
from bench.cost.sample import Load, Sample


def spent(user_s: float, system_s: float = 0.0) -> Spent:
    """Return what a group of one process spent."""
    return Spent(
        processes=1, user_s=user_s, system_s=system_s, voluntary=10, involuntary=1, memory_max_mb=50.0, memory_mb=40.0
    )


def sample(
    load: Load | None = None,
    *,
    tokens: int = 1000,
    requests: int = 10,
    groups: Mapping[str, Spent] | None = None,
    start: int = 0,
) -> Sample:
    """Return the sample of a load."""
    return Sample(
        load=load or Load(),
        start=start,
        requests=requests,
        tokens=tokens,
        events_per_token=1.0,
        wall_s=2.0,
        tokens_per_s=500.0,
        requests_per_s=5.0,
        ttft_p50_ms=20.0,
        ttft_p99_ms=40.0,
        gap_p50_ms=6.0,
        gap_p99_ms=9.0,
        gap_max_ms=11.0,
        client_share=0.3,
        ended=0,
        groups=dict({"node": spent(0.1)} if groups is None else groups),
    )
