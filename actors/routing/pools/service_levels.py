"""The pools of one model: the mapped pool of a request, and the pools that may stand in for it.

A pool is a subset of the workers of a leg, so all promises of routing hold within it: both legs of a request are asked
together, whichever pools they are in, and end together. A leg without a grid has no pools.

The order of pools for a request is the mapped one, then the faster ones. Only the first available one of these is used,
unless a worker has refused the request before its first token: then each one with room is used, in this order. If none
of them is available, any worker of the leg is used: a request never waits for lost workers while others are idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

from attrs import Factory, define, field, frozen

from actors.routing.pools.grid import Grid, pools_to_try
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate

Names: TypeAlias = frozenset[str]
"""Workers by their names in the cluster."""

Scope: TypeAlias = Mapping[Leg, Names]
"""The workers that a request may go to, by leg; any worker for a leg that is not in it."""

ANYWHERE: Scope = {}
GroupKey: TypeAlias = tuple[str, ...]


class Reach(Enum):
    """The pools that a choice may use."""

    MAPPED = "mapped"  # the mapped pool, or the next faster one if all its workers are gone
    NEXT = "next"  # the same, where workers that lost the request count as gone
    FASTER = "faster"  # the same, and all faster ones


@frozen
class LegPools:
    """The pools of one leg: the grid, and the workers and the priority of each by its name."""

    grid: Grid
    workers: Mapping[str, Names]
    priorities: Mapping[str, int]
    target_ms: float | None = None  # the target of a request without one; None: the midpoint
    orders: Mapping[str, tuple[Names, ...]] = field(init=False)  # by pool: its workers, then each faster one's

    @orders.default
    def _orders(self) -> Mapping[str, tuple[Names, ...]]:
        return {
            pool: tuple(self.workers[name] for name in pools_to_try(pool, self.priorities)) for pool in self.workers
        }

    def pool(self, leg: Leg, request: Generate) -> str:
        """Return the pool that a request is mapped to, by its tokens so far and its target."""
        hints, target_ms = request.hints, None
        if hints is not None:
            target_ms = hints.itl_target_ms if leg is Leg.DECODE else hints.ttft_target_ms
        return self.grid.pool(len(request.tokens), self.target_ms if target_ms is None else target_ms)


@define(eq=False)
class ServiceLevels:
    """The pools of all legs of one model; without any, every request may go to every worker."""

    legs: Mapping[Leg, LegPools] = Factory(dict)
    _pools: Mapping[str, str] = field(init=False)  # pools by worker

    @_pools.default
    def _pools_of_workers(self) -> Mapping[str, str]:
        workers = ((pool, names) for leg in self.legs.values() for pool, names in leg.workers.items())
        return {name: pool for pool, names in workers for name in names}

    def group(self, request: Generate) -> GroupKey:
        """Return the pools that a request is mapped to, one for each leg: equal ones wait for the same workers."""
        if not self.legs:
            return ()
        return tuple([pools.pool(leg, request) for leg, pools in self.legs.items()])

    def order(self, leg: Leg, request: Generate) -> tuple[Names, ...]:
        """Return the workers of the mapped pool of a leg with pools, then those of each faster one."""
        pools = self.legs[leg]
        return pools.orders[pools.pool(leg, request)]

    def pools(self, leg: Leg) -> int:
        """Return the number of pools of a leg that has pools."""
        return len(self.legs[leg].workers)

    def pool_of(self, worker: str) -> str:
        """Return the pool of a worker, empty if it has none."""
        return self._pools.get(worker, "")

    def diversions(self, request: Generate, workers: Mapping[Leg, str]) -> list[tuple[str, str]]:
        """Return the mapped pool and the actual one for each worker of a request outside its mapped pool."""
        pools = [
            (self.legs[leg].pool(leg, request), self.pool_of(name)) for leg, name in workers.items() if leg in self.legs
        ]
        return [(mapped, actual) for mapped, actual in pools if mapped != actual]
