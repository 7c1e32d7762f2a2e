"""The metrics of pools of engines: what each was asked for, and how often another one stood in."""

from __future__ import annotations

from attrs import define, field

from supervisor.telemetry.registry import Counter, Registry


@define(eq=False)
class PoolMetrics:
    """The counts of all pools of a gateway."""

    registry: Registry
    _requests: Counter = field(init=False)
    _diversions: Counter = field(init=False)

    def __attrs_post_init__(self) -> None:
        counter = self.registry.counter
        self._requests = counter("espalier_pool_requests", "Calls to workers of a pool, by outcome", "pool outcome")
        self._diversions = counter(
            "espalier_pool_diversions", "Requests mapped to a pool that another stood in for", "pool actual"
        )

    def called(self, pool: str, outcome: str) -> None:
        """Count a call to a worker of a pool that has ended: `ended`, `left`, or an error's code."""
        self._requests[pool, outcome] += 1

    def diverted(self, pool: str, actual: str) -> None:
        """Count a request that the grid maps to one pool and that another serves; empty: a worker without a pool."""
        self._diversions[pool, actual] += 1
