"""The pools of a gateway's models: as its routers use them, and as `status`, metrics and `GET /pools` show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from attrs import frozen

from actors.routing.load import Load
from actors.routing.pools.service_levels import LegPools, ServiceLevels
from protocol.messages.cluster import Leg, PoolState, rank_name
from supervisor.cluster.directory import Directory
from supervisor.config.checks.pool_checks import leg_of
from supervisor.config.pools import AxisKeys, grid
from supervisor.config.schema import Cluster
from supervisor.engines.work import RequestInbox


def service_levels(cluster: Cluster, model: str) -> ServiceLevels:
    """Return the pools of a model, from a file without mistakes."""
    section = cluster.model[model]
    legs = dict[Leg, LegPools]()
    for leg, of_leg in section.grid.by_leg.items():
        pools = {name: pool for name, pool in cluster.pool.items() if leg_of(cluster, name) == (model, leg)}
        workers = {
            name: frozenset(worker for engine in pool.engines for worker in _worker_names(cluster, engine))
            for name, pool in pools.items()
        }
        target_ms = section.itl_target_ms if leg == "decode" else section.ttft_target_ms
        priorities = {name: pool.priority for name, pool in pools.items()}
        legs[Leg(leg)] = LegPools(grid(of_leg), workers, priorities, target_ms)
    return ServiceLevels(legs)


def _worker_names(cluster: Cluster, engine: str) -> Iterator[str]:
    """Yield the names in the cluster of an engine's ranks."""
    section = cluster.engine[engine]
    for rank in range(section.data_parallel):
        yield f"{section.node}/{rank_name(engine, rank, section.data_parallel)}"


@frozen(eq=False)
class PoolView:
    """The pools of all models at this moment, as one gateway sees them."""

    cluster: Cluster
    directory: Directory
    levels: Mapping[str, ServiceLevels]  # by model
    inboxes: Mapping[str, RequestInbox]  # of the routers, by model

    def states(self) -> tuple[PoolState, ...]:
        """Return every pool: its available workers, their requests and slots, and its waiting requests."""
        return tuple(state for model in self.levels for state in self._states(model))

    def _states(self, model: str) -> Iterator[PoolState]:
        waiting, levels = self._waiting(model), self.levels[model]
        for leg, pools in levels.legs.items():
            loads: dict[str, list[Load]] = {name: [] for name in pools.workers}
            for worker in self.directory.ranked(model, leg):  # each once, however many pools there are
                # A node with another file may have a worker of that name for another leg, which is in none of these.
                if (of_pool := loads.get(levels.pool_of(worker.full_name))) is not None:
                    of_pool.append(worker.load)
            for name, names in pools.workers.items():
                up = loads[name]
                yield PoolState(
                    name=name,
                    model=model,
                    leg=leg,
                    priority=pools.priorities[name],
                    engines=len(names),
                    up=len(up),
                    busy=sum(load.busy for load in up),
                    slots=sum(load.slots for load in up),
                    waiting=waiting.get(name, 0),
                )

    def _waiting(self, model: str) -> Mapping[str, int]:
        """Return the number of requests of a model that wait, by pool; one waits for a pool of each of its legs."""
        waiting = dict[str, int]()
        for group, number in self.inboxes[model].waiting_by_group().items():
            for pool in filter(_is_name, group if isinstance(group, tuple) else ()):
                waiting[pool] = waiting.get(pool, 0) + number
        return waiting

    def document(self) -> dict[str, object]:
        """Return the body of `GET /pools`."""
        pools = [
            msgspec.to_builtins(state) | {"engines": self._engines(state)}  # instead of their number
            for state in self.states()
        ]
        return {"pools": pools, "grids": [each for model in self.levels for each in self._grids(model)]}

    def _engines(self, state: PoolState) -> list[dict[str, object]]:
        names = self.levels[state.model].legs[state.leg].workers[state.name]
        ranked = self.directory.ranked(state.model, state.leg)
        engines = list[dict[str, object]]()
        for name in sorted(names):
            worker = ranked.get(name)
            load = None if worker is None else worker.load
            busy, slots = (0, 0) if load is None else (load.busy, load.slots)
            engines.append({"name": name, "up": load is not None, "busy": busy, "slots": slots})
        return engines

    def _grids(self, model: str) -> Iterator[dict[str, object]]:
        section = self.cluster.model[model]
        for leg, of_leg in section.grid.by_leg.items():
            keys = dict[str, object]()
            for axis in (of_leg.lengths, of_leg.targets):
                keys |= _axis(axis)
            target = "itl_target_ms" if leg == "decode" else "ttft_target_ms"
            default = getattr(section, target)
            default = of_leg.targets.axis.midpoint if default is None else default
            yield {"model": model, "leg": leg, **keys, target: default, "pools": of_leg.pools}


def _axis(axis: AxisKeys) -> dict[str, object]:
    return {axis.low_key: axis.low, axis.high_key: axis.high, axis.resolution_key: axis.resolution}


def _is_name(part: object) -> bool:
    """Whether a part of what requests wait for is the name of a pool, and not an adapter."""
    return isinstance(part, str)
