"""Pools of a cluster's workers: requests are divided among two of each leg, by their length and their target."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from actors.routing.pools.grid import Axis, Grid
from actors.routing.pools.service_levels import LegPools, ServiceLevels
from protocol.messages.cluster import Leg

CELLS = 8
TOKENS_MAX = 160  # about what the longest prompt and its answer have
TARGET_MAX_MS = 1000.0
TARGETS_MS = (
    None,
    None,
    0.0,
    300.0,
    900.0,
    5000.0,
)  # of requests: none, below and above the middle, and beyond the grid


def target_of(name: str) -> float | None:
    """Return the target of the first token of a request, which its name decides: a draw would change every seed."""
    return TARGETS_MS[crc32(name.encode()) % len(TARGETS_MS)]


def pools_of(workers: Iterable[tuple[str, Leg]]) -> ServiceLevels:
    """Return two pools for each leg that has two workers at least: every other worker, and every other cell of lengths.

    Those with an early target are of the other pool; without a target, of the same."""
    legs: dict[Leg, list[str]] = {}
    for name, leg in workers:
        legs.setdefault(leg, []).append(name)
    levels = dict[Leg, LegPools]()
    for leg, names in legs.items():
        if leg is Leg.ENCODE or len(names) < 2:
            continue
        pools = {f"{leg}-{place}": frozenset(names[place::2]) for place in range(2)}
        rows = tuple((f"{leg}-{(cell + 1) % 2}", f"{leg}-{cell % 2}") for cell in range(CELLS))
        grid = Grid(Axis(0, TOKENS_MAX, CELLS), Axis(0, TARGET_MAX_MS, 2), rows)
        levels[leg] = LegPools(grid, pools, {name: place for place, name in enumerate(pools)})
    return ServiceLevels(levels)


def pools_by_target(workers: Iterable[tuple[str, Leg]]) -> ServiceLevels:
    """Return two pools for each leg, as `pools_of` does, of which the target alone decides."""
    levels = pools_of(workers)
    early_and_late = {leg: tuple(pools.workers) for leg, pools in levels.legs.items()}
    lengths, targets = Axis(0, 1, 1), Axis(0, TARGET_MAX_MS, 2)
    return ServiceLevels(
        {
            leg: LegPools(
                Grid(lengths, targets, (early_and_late[leg],)), pools.workers, dict.fromkeys(pools.workers, 0)
            )
            for leg, pools in levels.legs.items()
        }
    )
