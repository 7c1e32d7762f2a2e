"""The pools and grids of a cluster as `--check` prints them: which requests each pool gets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from supervisor.config.pools import AxisKeys, GridSection
from supervisor.config.schema import Cluster


def pool_lines(cluster: Cluster) -> list[str]:
    """Return the lines about every grid, none if there are no grids."""
    return [line for name in cluster.model for line in _model_lines(cluster, name)]


def _model_lines(cluster: Cluster, model: str) -> Iterator[str]:
    for leg, grid in cluster.model[model].grid.by_leg.items():
        engines = {name for name, engine in cluster.engine.items() if (engine.model, engine.leg) == (model, leg)}
        pools = {name: pool for name, pool in cluster.pool.items() if engines.issuperset(pool.engines)}
        listed = "; ".join(
            f"{name} of priority {pool.priority} with {', '.join(pool.engines)}" for name, pool in pools.items()
        )
        rest = ", ".join(sorted(engines.difference(*(pool.engines for pool in pools.values()))))
        yield f"pools of {model} for {leg}: {listed}{rest and f'; in no pool: {rest}'}"
        yield from _grid_lines(grid)


def _grid_lines(grid: GridSection) -> Iterator[str]:
    lengths = list(_cells(grid.lengths))
    for (low, high), row in zip(lengths, grid.pools, strict=True):
        columns = groupby(zip(_cells(grid.targets), row, strict=True), key=lambda column: column[1])
        spans = [(pool, [cell for cell, _ in cells]) for pool, cells in columns]
        targets = ", ".join(f"{pool} for {cells[0][0]:g} to {cells[-1][1]:g} ms" for pool, cells in spans)
        yield f"  {_spelled(grid.lengths)} {low:,.6g} to {high:,.6g}, {_spelled(grid.targets)}: {targets}"


def _cells(keys: AxisKeys) -> Iterator[tuple[float, float]]:
    """Yield the ends of each cell of an axis."""
    axis = keys.axis
    ends = [axis.low + axis.step * number for number in range(axis.resolution)]
    yield from zip(ends, [*ends[1:], axis.high], strict=True)


def _spelled(keys: AxisKeys) -> str:
    return keys.resolution_key.removesuffix("_resolution")
