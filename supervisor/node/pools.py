"""The pools of a gateway's models: as its routers use them, and as `status`, metrics and `GET /pools` show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
from attrs import define, field

from actors.routing.load import Load
from actors.routing.pools.service_levels import LegPools, ServiceLevels
from protocol.messages.cluster import Leg, PoolState, rank_name
from supervisor.cluster.directory import Directory
from supervisor.config.checks.pool_checks import leg_of
from supervisor.config.pools import AxisKeys, grid
from supervisor.config.schema import Cluster
from supervisor.control.control import NodeControl
from supervisor.engines.work import RequestInbox
from supervisor.telemetry.registry import Registry, Samples


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


@define(eq=False)
class PoolView:
    """The pools of all models at this moment, as one gateway sees them."""

    cluster: Cluster
    directory: Directory
    levels: dict[str, ServiceLevels] = field(factory=dict)  # by model
    inboxes: dict[str, RequestInbox] = field(factory=dict)  # of the routers, by model

    def states(self) -> tuple[PoolState, ...]:
        """Return every pool: its workers that can be asked, their requests and slots, and the requests that wait."""
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
                numbers = len(names), len(up), sum(load.busy for load in up), sum(load.slots for load in up)
                yield PoolState(name, model, leg, pools.priorities[name], *numbers, waiting.get(name, 0))

    def _waiting(self, model: str) -> Mapping[str, int]:
        """Return the number of requests of a model that wait, by pool; one waits for a pool of each of its legs."""
        waiting = dict[str, int]()
        for group, number in self.inboxes[model].waiting_by_group().items():
            for pool in group if isinstance(group, tuple) else ():
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
            numbers = (0, 0) if load is None else (load.busy, load.slots)
            engines.append({"name": name, "up": load is not None, "busy": numbers[0], "slots": numbers[1]})
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

    def show(self, controls: NodeControl, registry: Registry) -> None:
        """Show every pool to operators, and as gauges."""
        controls.pools = self.states
        gauges = {
            "workers_up": ("Workers of the pool that can be asked", "up"),
            "busy": ("Requests at workers of the pool, also those that wait there", "busy"),
            "slots": ("Slots of the workers of the pool that can be asked", "slots"),
            "waiting": ("Requests that wait for the pool at this gateway", "waiting"),
        }
        for name, (about, key) in gauges.items():
            registry.add_gauge(f"espalier_pool_{name}", about, "pool", partial(self._samples, key))

    def _samples(self, key: str) -> Samples:
        return [((state.name,), float(getattr(state, key))) for state in self.states()]


def _axis(axis: AxisKeys) -> dict[str, object]:
    return {axis.low_key: axis.low, axis.high_key: axis.high, axis.resolution_key: axis.resolution}
