"""One seed of a cluster with two gateways at one port, one of which is drained and started again under load.

A client that connects reaches one of the gateways that listen, as the kernel would decide. Both have their own view of
the same workers, so that requests for a pair may cross.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, ClassVar, cast

import trio
from attrs import define, field

from supervisor.cluster import readiness
from supervisor.cluster.directory import Directory
from tests.rig.scheduler import tasks
from tests.rig.small_system import living
from tests.system.simulator.cluster import BRIEF_S, LINKED_WITHIN_S, SECTION, SETTLED_S, Cluster, linked, others_up
from tests.system.simulator.cluster_faults import ClusterFaults
from tests.system.simulator.cluster_seed import ClusterRun
from tests.system.simulator.fault_plan import NO_PLAN, plan_gateways
from tests.system.simulator.probes import health
from tests.system.simulator.seed import CHAOS_S, traced
from tests.system.simulator.system import System

FRONTS: Sequence[str] = ("main", "second")


@define(eq=False)
class Port:
    """The gateways as their clients see them: each connection reaches one that listens."""

    run: TwoGatewaysRun

    def connect(self) -> Any:
        there = [front for front in self.run.gateways if not (front.over.is_set() or front.gateway.port.leaving)]
        # At a port that it shares, a gateway listens once it has been ready.
        self.run.listening.update(front for front in there if readiness.never_ready(front.directory, ("tiny",)) is None)
        return self.run.rng.choice([front for front in there if front in self.run.listening]).connect()

    @property
    def refused(self) -> set[tuple[int, ...]]:
        """The prompts that the engines refuse, one set for all gateways; it is changed in place."""
        return self.run.system.refused

    @refused.setter
    def refused(self, prompts: set[tuple[int, ...]]) -> None:
        assert prompts is self.run.system.refused

    def check_backlogs(self) -> None:
        for front in self.run.gateways:
            front.check_backlogs()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run.system, name)


@define(eq=False)
class TwoGatewaysFaults(ClusterFaults):
    """Faults of workers, and of their links to either gateway."""

    run: TwoGatewaysRun = field(kw_only=True)

    def may(self, code: str) -> bool:
        crowded = code == "overloaded" and any(front.gate.was_full for front in self.run.gateways)
        return crowded or ClusterFaults.may(self, code)

    def front_of_fault(self) -> str:
        return self.rng.choice(FRONTS)


@define(eq=False)
class TwoGatewaysRun(ClusterRun):
    """One run of a cluster with two gateways."""

    fronts: ClassVar[Sequence[str]] = FRONTS
    single_fault_share: ClassVar[float] = 0.0
    second: Cluster = field(init=False)
    new_second: Callable[[], Cluster] = field(init=False)
    restarts: bool = field(init=False)
    listening: set[Cluster] = field(init=False, factory=set)  # once they have been ready

    def __attrs_post_init__(self) -> None:
        self.shape = {"workers": 0}  # neither gateway's node has engines
        ClusterRun.__attrs_post_init__(self)
        self.front_ends, self.drains = None, False
        self.restarts = self.rng.random() < 0.7 or self.plan.restarts
        self.new_second = partial(cast("partial[Cluster]", self.new_front), node_name="second")
        self.second = self._prepared(self.new_second())
        self.system.gateway.port.shared = True

    def _prepared(self, second: Cluster) -> Cluster:
        second.faults = self.system.faults
        second.routing.observer = self.observer()
        second.gateway.port.shared = True
        return second

    def new_faults(self) -> ClusterFaults:
        return TwoGatewaysFaults(self.system, self.rng, self.note, run=self)

    @property
    def gateways(self) -> tuple[Cluster, ...]:
        return (self.cluster, self.second)

    def checked_systems(self) -> Sequence[System]:
        return self.gateways

    @property
    def port(self) -> System:
        return cast("System", Port(self))

    def directories(self) -> list[Directory]:
        return [*self.cluster.directories, *([] if self.second.over.is_set() else [self.second.directory])]

    async def all(self) -> None:
        """Check safety while faults are injected and a gateway is restarted, then check the liveness of both."""
        self._note_nodes()
        with others_up(self.cluster):
            async with living(self.cluster), trio.open_nursery() as nursery:
                await self._start_second(nursery)
                async with self._both_linked():
                    with trio.fail_after(CHAOS_S):
                        async with trio.open_nursery() as chaos:
                            if self.restarts:
                                chaos.start_soon(self._restart_second, nursery)
                            await self.chaos()
                    self.system.end_canaries()
                    await trio.sleep(self.settled_s)
                    await self.cluster.put_all_right()
                    for front in self.gateways:
                        front.heal()
                    await self.system.wait_trusted()
                    await trio.sleep(SETTLED_S)
                    for front in self.gateways:
                        assert linked(front), "nodes that are up are not linked"
                        await health(front)
                    await trio.sleep(BRIEF_S)
                    self.second.tasks = self.cluster.tasks  # it may have been started in the middle
                    for front in self.gateways:
                        await front.check_at_rest()
                    for front in self.gateways:
                        await front.check_serves()
                self.cluster.check_all()
                self.second.scope.cancel(reason="the end")

    @asynccontextmanager
    async def _both_linked(self) -> AsyncIterator[None]:
        with trio.fail_after(LINKED_WITHIN_S):
            for front in self.gateways:
                while not linked(front) or readiness.never_ready(front.directory, ("tiny",)):  # noqa: ASYNC110  # of many nodes
                    await trio.sleep(0.1)
        self.listening.update(self.gateways)
        await trio.sleep(SECTION.retry_max_s * 2)  # until nodes that dial without success notice their link
        for front in self.gateways:
            front.tasks = tasks()
        yield

    async def _start_second(self, nursery: trio.Nursery) -> None:
        """Run the second gateway's node; return once its children are up."""

        async def live(second: Cluster, *, task_status: trio.TaskStatus[None]) -> None:
            async with living(second):
                task_status.started()
                await second.over.wait()

        await nursery.start(live, self.second)

    async def _restart_second(self, nursery: trio.Nursery) -> None:
        """Drain the second gateway while clients use it, and start it again."""
        await trio.sleep(1 + self.rng.random() * 3)
        self.faults.happened.add("drain")
        self.note("gateway drains")
        before = self.second
        async with trio.open_nursery() as before.node.nursery:
            before.drain()
        await before.over.wait()
        assert not before.gateway.connections, "a connection outlives its gateway"
        await trio.sleep(self.rng.random() * 3)
        self.second = self._prepared(self.new_second())
        await self._start_second(nursery)
        self.note("gateway back")


@cache
def run_gateways_seed(seed: int, *, planned: bool = False) -> str:
    """Run one seed of a cluster with two gateways without logs; return its trace."""
    plan = plan_gateways(seed) if planned else NO_PLAN

    async def two_gateways(rng: random.Random) -> str:
        async with trio.open_nursery() as nursery:
            return await TwoGatewaysRun(rng, plan=plan, nursery=nursery).traced()

    return traced(two_gateways, seed)
