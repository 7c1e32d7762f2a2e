"""A whole cluster in one process: a node with the gateway and the router, and nodes that compute, joined by links."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import trio
from attrs import define, field

from protocol.cluster import Leg
from protocol.errors import StartFailed
from supervisor import known
from supervisor.config import ClusterSection
from supervisor.directory import Directory
from supervisor.tree import Child, Tree
from tests.fakes import FakeHost
from tests.sim.clock import tasks
from tests.sim.legs import LegCosts, LegHost
from tests.sim.nodes import Plan, SimLinks, Spot, check_links
from tests.sim.system import System, prompt_of
from tests.world import LONG_S, World, living

SECTION = ClusterSection(greet_s=2.0, retry_max_s=1.0)
LINKED_WITHIN_S = 20.0
LOOKS = 40  # at how many answers are under way
SETTLED_S = 10.0  # for what is over to be over everywhere


@define(eq=False)
class Cluster(System):
    """The gateway's node, and the others as it sees them; it may have workers of its own."""

    plan: Plan = field(kw_only=True)
    links: SimLinks = field(init=False)
    prefill_tokens_min: int = 0

    def __attrs_post_init__(self) -> None:
        self.host_of = partial(LegHost, rooms=self.plan.rooms)
        System.__attrs_post_init__(self)
        self.routing.prefill_tokens_min = self.prefill_tokens_min
        for spot in self.spots:
            spot.costs.refused = self.costs.refused

    def _plug_workers(self) -> None:
        System._plug_workers(self)
        self.links = self.plan.links("main", self.directory, listens=True, joins=False)

    def children(self, *workers: Tree) -> tuple[Child | Tree, ...]:
        gateway, *rest = System.children(self, *workers)
        return (gateway, Child(name="links", run=self.links.run, stop_within_s=2.0), *rest)

    # All nodes ---------------------------------------------------------------------------

    @property
    def spots(self) -> list[Spot]:
        return list(self.plan.spots.values())

    @property
    def worlds(self) -> list[World]:
        """Every node that is up and computes."""
        here: list[World] = [self] if self.workers else []
        return here + [spot.life for spot in self.spots if spot.life is not None]

    def all_hosts(self) -> Iterator[FakeHost]:
        for world in self.worlds:
            yield from (host for number, host in world.hosts.items() if world.engines[number].now is not None)

    def holding(self, prompt: list[int]) -> bool:
        held = (
            each for host in self.all_hosts() for each in (*host.scheduler.running.values(), *host.scheduler.waiting)
        )
        return any(list(prompt_of(each.request)) == prompt for each in held)

    def given(self, prompt: list[int], seed: int | None) -> int:
        asked = tuple(prompt), seed
        every = (host for world in self.worlds for host in world.hosts.values())
        return max((host.scheduler.given.get(asked, 0) for host in every), default=0)

    def _refuses(self, request_id: str) -> bool:
        running = (host.scheduler.running.get(request_id) for world in self.worlds for host in world.hosts.values())
        return any(held is not None and prompt_of(held.request) in self.refused for held in running)

    # The end -----------------------------------------------------------------------------

    def heal(self) -> None:
        """Be whole again: every node is up."""
        System.heal(self)
        for spot in self.spots:
            if spot.life is None:
                spot.start()

    async def check_at_rest(self) -> None:
        await System.check_at_rest(self)
        check_links(self.directory)
        for spot in self.spots:
            assert spot.life is not None
            spot.life.check_idle()

    async def check_serves(self) -> None:
        """Check that every slot for answers can be had, all at once."""
        slots = dict.fromkeys(Leg, 0)
        for world in self.worlds:
            assert isinstance(world.costs, LegCosts)
            # Long answers and short prompts, so that all answers can be under way before one of them ends.
            world.costs.step_s = 0.02 if world.costs.leg is Leg.PREFILL else 0.6
            slots[world.costs.leg] += world.workers * world.costs.slots
        many = min(slots[Leg.BOTH] + (slots[Leg.DECODE] if slots[Leg.PREFILL] else 0), self.requests_max)
        at_once: list[int] = []

        async def look() -> None:
            for _ in range(LOOKS):
                await trio.sleep(0.6)
                hosts = [host for host in self.all_hosts() if host.costs.leg is not Leg.PREFILL]
                at_once.append(sum(len(host.scheduler.running) for host in hosts))

        with trio.fail_after(3 * LONG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                nursery.start_soon(self.probe_all, many + 2)
        assert max(at_once) >= many, f"a slot is lost: {max(at_once)} of {many}"
        await trio.sleep(SETTLED_S)
        await self.check_at_rest()

    def check_all(self) -> None:
        """Check that no actor of any life of any node ended by anything but the faults that were planned."""
        for spot in self.spots:
            for life in spot.lives:
                life.faults = (*self.faults, StartFailed) if spot.fell else self.faults
                life.check_how_it_went()


def is_whole(directory: Directory, many: int) -> bool:
    """Whether a node knows, and is linked to, all others."""
    links = [link for _, link, _ in directory.nodes.values()]
    return len(links) == many and all(link is not None and not link.lost for link in links)


@asynccontextmanager
async def together(system: Cluster) -> AsyncIterator[Cluster]:
    """Run all nodes for the body, and end them in order."""
    for spot in system.spots:
        spot.start()
    async with living(system):
        with trio.fail_after(LINKED_WITHIN_S):
            while not linked(system) or known.never_ready(system.directory, ("tiny",)):  # noqa: ASYNC110  # of many nodes
                await trio.sleep(0.1)
        await trio.sleep(SECTION.retry_max_s * 2)  # for those that dial in vain to see that there is a link by now
        system.tasks = tasks()
        yield system
        system.check_all()
    for spot in system.spots:
        if spot.life is not None:
            spot.life.scope.cancel(reason="the end")


def linked(system: Cluster) -> bool:
    """Whether every node is up and linked to all others."""
    lives = [spot.life for spot in system.spots]
    directories = [system.directory, *(life.directory for life in lives if life is not None)]
    return None not in lives and all(is_whole(each, len(lives)) for each in directories)
