"""Validation of `[pool.NAME]` and `[model.NAME.grid]` across keys: every mistake at once."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.messages.cluster import Leg
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.pools import TARGETS, AxisKeys, GridSection
from supervisor.config.schema import Cluster, EngineSection
from supervisor.config.sections import ModelSection


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the mistakes in pools and grids."""
    yield from _pool_mistakes(cluster)
    for name, model in cluster.model.items():
        path = join("model", segment(name))
        grids = model.grid.by_leg
        if "both" in grids and len(grids) > 1:
            other = next(iter(grids))
            yield Mistake(f"{path}.grid.both", f"stands beside {path}.grid.{other}: keep the grids of one of the two")
        for leg, grid in grids.items():
            yield from _grid_mistakes(cluster, name, leg, grid)
        yield from _target_mistakes(model, path)


def leg_of(cluster: Cluster, pool: str) -> tuple[str, str] | None:
    """Return the model and the leg of a pool's first existing engine, None if there is none."""
    engines = (cluster.engine[name] for name in cluster.pool[pool].engines if name in cluster.engine)
    return next(((engine.model, engine.worker_leg.value) for engine in engines), None)


# Pools ------------------------------------------------------------------------------------------


def _pool_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    pools: dict[str, str] = {}  # the pool of each engine
    for name, pool in cluster.pool.items():
        path = join("pool", segment(name))
        if not pool.engines:
            yield Mistake(f"{path}.engines", "is missing or empty: a pool has one engine at least")
        for index, engine in enumerate(pool.engines):
            key = f"{path}.engines[{index}]"
            if engine not in cluster.engine:
                yield Mistake(key, f"there is no engine {engine}; there is {', '.join(cluster.engine)}")
            elif (other := pools.setdefault(engine, name)) != name or engine in pool.engines[:index]:
                yield Mistake(key, f"engine {engine} is in pool {other} already")
            else:
                yield from _member_mistakes(cluster, name, cluster.engine[engine], key)
        if (shared := leg_of(cluster, name)) is not None and Leg(shared[1]).generates:
            model, leg = shared
            if model in cluster.model and leg not in cluster.model[model].grid.by_leg:
                grid = f"{join('model', segment(model))}.grid.{leg}"
                yield Mistake(path, f"means nothing: there is no {grid}, and it has engines whose leg is {leg}")


def _member_mistakes(cluster: Cluster, pool: str, engine: EngineSection, key: str) -> Iterator[Mistake]:
    shared = leg_of(cluster, pool)
    if not engine.worker_leg.generates:
        sort = "an encoder" if engine.worker_leg is Leg.ENCODE else "an embedder"
        yield Mistake(key, f"is {sort}: pools are of engines that compute tokens")
    elif shared is not None and shared != (engine.model, engine.leg):
        model, leg = shared
        why = f"is no engine of model {model} whose leg is {leg}, as the first of the pool"
        yield Mistake(key, f"{why}: its model is {engine.model}, its leg {engine.leg}")


# Grids ------------------------------------------------------------------------------------------


def _grid_mistakes(cluster: Cluster, model: str, leg: str, grid: GridSection) -> Iterator[Mistake]:
    path = join("model", segment(model)) + f".grid.{leg}"
    for axis in (grid.lengths, grid.targets):
        yield from _axis_mistakes(axis, path)
    yield from _shape_mistakes(grid, f"{path}.pools")
    if not any((engine.model, engine.worker_leg.value) == (model, leg) for engine in cluster.engine.values()):
        yield Mistake(path, f"means nothing: there is no engine of model {model} whose leg is {leg}")
        return
    named = set[str]()
    for row, names in enumerate(grid.pools):
        for column, name in enumerate(names):
            if name not in named:  # once, however many cells have it
                named.add(name)
                yield from _cell_mistakes(cluster, model, leg, name, f"{path}.pools[{row}][{column}]")


def _axis_mistakes(axis: AxisKeys, path: str) -> Iterator[Mistake]:
    for key in ("low", "high", "resolution"):
        if getattr(axis, key) is None:
            yield Mistake(f"{path}.{getattr(axis, f'{key}_key')}", "is missing")
    if axis.low is None or axis.high is None:
        return
    if axis.low >= axis.high:
        yield Mistake(f"{path}.{axis.low_key}", f"must be below {axis.high_key} ({axis.high:g}), got {axis.low:g}")
    elif axis.resolution is not None and axis.axis.step == 0:  # the least numbers that there are
        yield Mistake(f"{path}.{axis.resolution_key}", f"cannot divide a range of {axis.high - axis.low:g}")


def _shape_mistakes(grid: GridSection, path: str) -> Iterator[Mistake]:
    rows, columns = grid.lengths, grid.targets
    if not grid.pools:
        yield Mistake(path, "is missing: it names a pool for each pair of cells")
        return
    if rows.resolution is not None and len(grid.pools) != rows.resolution:
        yield Mistake(path, f"has {len(grid.pools)} rows, and {rows.resolution_key} is {rows.resolution}")
    for number, row in enumerate(grid.pools):
        if columns.resolution is not None and len(row) != columns.resolution:
            why = f"has {len(row)} pools, and {columns.resolution_key} is {columns.resolution}"
            yield Mistake(f"{path}[{number}]", why)


def _cell_mistakes(cluster: Cluster, model: str, leg: str, pool: str, path: str) -> Iterator[Mistake]:
    if pool not in cluster.pool:
        listed = ", ".join(cluster.pool) or "none at all"
        yield Mistake(path, f"there is no pool {pool}; there is {listed}")
    elif (shared := leg_of(cluster, pool)) is not None and shared != (model, leg):
        why = f"pool {pool} has no engine of model {model} whose leg is {leg}"
        yield Mistake(path, f"{why}: its engines are of model {shared[0]} and leg {shared[1]}")


def _target_mistakes(model: ModelSection, path: str) -> Iterator[Mistake]:
    """Yield the model's own targets without a grid that reads them."""
    for key, legs in TARGETS.items():
        if getattr(model, key) is not None and key not in model.grid.targets:
            yield Mistake(f"{path}.{key}", f"means nothing without {' or '.join(f'{path}.grid.{leg}' for leg in legs)}")
