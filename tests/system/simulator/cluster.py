"""A cluster in one process: a node with the gateway and the router, and nodes with engines, joined by links."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import trio
from attrs import define, field

from actors.routing.policies.least_loaded import least_loaded
from actors.routing.pools.service_levels import ServiceLevels
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from supervisor.cluster import readiness
from supervisor.cluster.directory import Directory
from supervisor.cluster.link_settings import LinkSettings
from supervisor.supervision.tree import Child
from tests.rig.fake_engine import prompt_of
from tests.rig.fake_host import FakeHost
from tests.rig.scheduler import tasks
from tests.rig.small_system import LONG_S, SmallSystem, living
from tests.system.simulator.caches import CacheLife
from tests.system.simulator.encoders import NodeEncoders
from tests.system.simulator.legs import LegCosts, LegHost
from tests.system.simulator.nodes import ClusterPlan, NodeSlot, SimLinks, check_inboxes, check_links
from tests.system.simulator.pools import pools_of
from tests.system.simulator.system import System

SECTION = LinkSettings(handshake_s=2.0, retry_max_s=1.0)
LINKED_WITHIN_S = 20.0
SETTLED_S = 10.0  # after a fault, until every node has released everything
BRIEF_S = 3.0  # the same without faults


@define(eq=False)
class Cluster(System):
    """The gateway's node, and the others as it sees them; it may have workers of its own."""

    plan: ClusterPlan = field(kw_only=True)
    links: SimLinks = field(init=False)
    prefill_tokens_min: int = 0
    pooled: bool = False  # the workers of each leg are in two pools

    def __attrs_post_init__(self) -> None:
        self.host_of = partial(LegHost, rooms=self.plan.rooms)
        System.__attrs_post_init__(self)
        self.routing.prefill_tokens_min = self.prefill_tokens_min
        if self.pooled:
            self.routing.levels = pools_of(self.pooled_workers())
        self.node.assembly.links = self.links  # type: ignore[misc]  # of what stands for one
        for node_slot in self.node_slots:
            node_slot.costs.refused = self.costs.refused
            node_slot.gallery = self.gallery

    def new_directory(self) -> Directory:
        """Return the directory of the gateway's node in this cluster."""
        return self.plan.directory(self.node_name)

    def pooled_workers(self) -> Iterator[tuple[str, Leg]]:
        """Yield the name in the cluster and the leg of every worker."""
        yield from ((worker.full_name, worker.leg) for worker in self.directory.local.values())
        for slot in self.node_slots:
            yield from ((f"{slot.name}/{offer.name}", offer.leg) for offer in slot.offers)

    def _register_workers(self) -> None:
        super()._register_workers()
        self.links = self.plan.links(self.node_name, self.publishers, listens=True, joins=False)

    def linking(self) -> tuple[Child, ...]:
        return (Child(name="links", run=self.links.run, stop_within_s=2.0),)

    # All nodes ---------------------------------------------------------------------------

    @property
    def node_slots(self) -> list[NodeSlot]:
        return list(self.plan.node_slots.values())

    @property
    def nodes_up(self) -> list[SmallSystem]:
        """Every node that is up and has engines that compute tokens."""
        here: list[SmallSystem] = [self] if self.workers and not self.over.is_set() else []
        return here + [node_slot.life for node_slot in self.node_slots if node_slot.life and node_slot.life.workers]

    @property
    def operated_systems(self) -> list[SmallSystem]:
        return self.nodes_up

    @property
    def encoding_up(self) -> list[NodeEncoders]:
        """The encoders of every node that is up."""
        here = [] if self.over.is_set() else [self.encoding]
        every = here + [node_slot.life.encoding for node_slot in self.node_slots if node_slot.life is not None]
        return [encoding for encoding in every if encoding.count]

    @property
    def directories(self) -> list[Directory]:
        """The directory of each node that is up."""
        return [
            self.directory,
            *(node_slot.life.directory for node_slot in self.node_slots if node_slot.life is not None),
        ]

    def cache_lives(self) -> Iterator[tuple[str, CacheLife]]:
        if not self.over.is_set():
            yield from self.publishers.lives()
        for node_slot in self.node_slots:
            if node_slot.life is not None:
                yield from node_slot.life.publishers.lives()

    def all_hosts(self) -> Iterator[FakeHost]:
        for node in self.nodes_up:
            yield from (host for number, host in node.hosts.items() if node.engines[number].live is not None)

    def holding(self, prompt: list[int]) -> bool:
        return any(
            list(prompt_of(request)) == prompt for host in self.all_hosts() for request in host.scheduler.requests
        )

    def given(self, prompt: list[int], seed: int | None) -> int:
        asked = tuple(prompt), seed
        every = (host for node in self.nodes_up for host in node.hosts.values())
        return max((host.scheduler.given.get(asked, 0) for host in every), default=0)

    def _refuses(self, request_id: str) -> bool:
        running = (host.scheduler.running.get(request_id) for node in self.nodes_up for host in node.hosts.values())
        return any(held is not None and prompt_of(held.request) in self.refused for held in running)

    # The end -----------------------------------------------------------------------------

    def drain(self) -> None:
        grace = self.node.runtime.grace
        self.links.drains_within(min(self.drain_s, grace.shortened_s) if grace.shortened else self.drain_s)
        System.drain(self)

    async def crash(self) -> None:
        """End as a killed process does: every connection is cut without a `Bye`."""
        self.plan.net.listening.pop(str(self.links.listen), None)
        self.plan.net.cut(self.node_name)
        for stream in self.sockets:
            with suppress(OSError):  # it is closed already
                stream.socket.shutdown(socket.SHUT_RDWR)
        for host in self.hosts.values():
            host.crash()
        self.scope.cancel(reason="the gateway's node is killed")
        await self.over.wait()
        self.plan.net.cut(self.node_name)

    def check_nothing_is_left(self) -> None:
        """Check that nothing is left of a gateway's node that has ended, nor of its requests on other nodes."""
        assert self.over.is_set()
        self._check_gateway()
        gone = {self.node_name, *(node_slot.name for node_slot in self.node_slots if node_slot.life is None)}
        for node_slot in self.node_slots:
            if node_slot.life is not None:
                node_slot.life.check_idle(gone)

    def heal(self) -> None:
        """Remove all faults, and start every node that is down."""
        System.heal(self)
        for node_slot in self.node_slots:
            node_slot.encoder_costs.heal()
            if node_slot.life is None:
                node_slot.start()
            else:
                node_slot.life.encoding.heal()

    async def check_at_rest(self) -> None:
        await System.check_at_rest(self)
        check_links(self.directory, prefixes=self.prefixes)
        check_inboxes(self.directory, self.inboxes)
        assert not len(self.plan.rooms.states), "a prefill holds a state for no decode"
        for node_slot in self.node_slots:
            assert node_slot.life is not None
            node_slot.life.check_idle()

    async def check_serves(self) -> None:
        """Check that all slots for answers can be taken, those of one engine at once."""
        self.routing.levels = ServiceLevels()  # equal requests are all of one pool
        await self.readmit_workers()
        self.routing.policy = least_loaded  # `kv` lets requests wait for a worker that has their beginnings
        for encoding in self.encoding_up:
            await encoding.check_serves()
        slots = dict.fromkeys(Leg, 0)
        if self.sighted:
            self.plan.rooms.transfer_s = (
                0.0  # prompts with pictures are longer, so that a prefill takes fewer at a time
            )
        for node in self.nodes_up:
            assert isinstance(node.costs, LegCosts)
            # Long answers and short prompts, so that a worker's answers can be under way before one of them ends.
            node.costs.step_s = 0.02 if node.costs.leg is Leg.PREFILL else 0.6
            slots[node.costs.leg] += node.workers * node.costs.slots
        many = min(slots[Leg.BOTH] + (slots[Leg.DECODE] if slots[Leg.PREFILL] else 0), self.requests_max)
        at_once: Counter[int] = Counter()  # the most of each engine: on a slow network not all are full together

        async def look() -> None:
            while True:
                await trio.sleep(0.6)
                for number, host in enumerate(self.all_hosts()):
                    if host.costs.leg is not Leg.PREFILL:
                        at_once[number] = max(at_once[number], len(host.scheduler.running))

        with trio.fail_after(3 * LONG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                await self.probe_all(many + 2)
                nursery.cancel_scope.cancel(reason="all have been answered")
        assert at_once.total() >= many, f"a slot is lost: {at_once.total()} of {many}"
        await trio.sleep(BRIEF_S)
        await self.check_at_rest()

    def check_all(self) -> None:
        """Check that in every process of every node actors ended only by the planned faults."""
        for node_slot in self.node_slots:
            for life in node_slot.lives:
                life.faults = (*self.faults, StartFailed) if node_slot.start_failed else self.faults
                life.check_how_it_went()


class OfCluster:
    """What has a cluster as its system."""

    system: System

    @property
    def cluster(self) -> Cluster:
        assert isinstance(self.system, Cluster)
        return self.system


def is_linked(directory: Directory, many: int) -> bool:
    """Whether a node is linked to all others that it should be linked to."""
    links = [
        node.link for name, node in directory.nodes.items() if node.link is not None or directory.should_link(name)
    ]
    return len(links) >= (many if directory.routes else 1) and all(link is not None and not link.lost for link in links)


@contextmanager
def others_up(system: Cluster) -> Iterator[None]:
    """Run the nodes with engines while the body runs, and end them."""
    for node_slot in system.node_slots:
        node_slot.start()
    yield
    for node_slot in system.node_slots:
        if node_slot.life is not None:
            node_slot.life.scope.cancel(reason="the end")


@asynccontextmanager
async def together(system: Cluster) -> AsyncIterator[Cluster]:
    """Run the gateway's node beside the others for the body, and end it in order."""
    async with living(system):
        with trio.fail_after(LINKED_WITHIN_S):
            while not linked(system) or readiness.never_ready(system.directory, ("tiny",)):  # noqa: ASYNC110  # of many nodes
                await trio.sleep(0.1)
        await trio.sleep(SECTION.retry_max_s * 2)  # until nodes that dial without success notice their link
        system.tasks = tasks()
        yield system
        system.check_all()


def linked(system: Cluster) -> bool:
    """Whether every node is up and linked to all others."""
    directories = system.directories
    return len(directories) == 1 + len(system.node_slots) and all(
        is_linked(directory, len(system.node_slots)) for directory in directories
    )
