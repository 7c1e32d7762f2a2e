"""Pools of a cluster's workers: the requests of each leg are divided among two by their length."""

from __future__ import annotations

from collections.abc import Iterable

from actors.routing.grid import Axis, Grid
from actors.routing.service_levels import LegPools, ServiceLevels
from protocol.cluster import Leg

CELLS = 8
TOKENS_MAX = 160  # about what the longest prompt and its answer have


def pools_of(workers: Iterable[tuple[str, Leg]]) -> ServiceLevels:
    """Return two pools for each leg that has two workers at least: every other worker, and every other cell."""
    legs: dict[Leg, list[str]] = {}
    for name, leg in workers:
        legs.setdefault(leg, []).append(name)
    levels = dict[Leg, LegPools]()
    for leg, names in legs.items():
        if leg is Leg.ENCODE or len(names) < 2:
            continue
        pools = {f"{leg}-{place}": frozenset(names[place::2]) for place in range(2)}
        rows = tuple((f"{leg}-{cell % 2}",) for cell in range(CELLS))
        grid = Grid(Axis(0, TOKENS_MAX, CELLS), Axis(0, 1, 1), rows)
        levels[leg] = LegPools(grid, pools, {name: place for place, name in enumerate(pools)})
    return ServiceLevels(levels)
