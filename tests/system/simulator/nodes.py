"""Nodes with engines and without a gateway: each has a tree, a directory and links, may crash or drain, and come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import trio
from attrs import Factory, define, field

from protocol.errors import StartFailed
from protocol.link.greeting import Incarnation
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, Offer
from protocol.messages.generation import Generate
from protocol.messages.media import Encode
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.mesh import Mesh
from supervisor.engines.work import RequestInbox
from supervisor.gateway.gateway import Gateway
from supervisor.links.endpoint import Endpoint
from supervisor.links.serving import Service
from supervisor.node.assembly import in_order
from supervisor.node.node import BYE_S, Node
from supervisor.processes.process import GracePeriods
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import Child, Tree
from tests.rig.fake_engine import Costs
from tests.rig.network import SimTransport
from tests.rig.small_system import SmallSystem, check_streams
from tests.system.simulator.encoders import EncoderCosts, Gallery, NodeEncoders
from tests.system.simulator.legs import LegCosts, LegHost, Rooms
from tests.system.simulator.node_network import NodeNetwork
from tests.system.simulator.offers import offer_of, register_workers, work
from tests.system.simulator.prefix_plan import PrefixPlan
from tests.system.simulator.prefix_system import NodePublishers, watches_on
from tests.system.simulator.release_times import ReleaseDeadlines
from tests.system.simulator.simulated_engine import LocalEngine

NOON = 1_700_000_000
SECRET = b"only nodes know it"
AGAIN_S = 1.0
STOP_S = 15.0  # for every child that does not end by itself


@define(eq=False)
class SimLinks(Mesh):
    """Links over a simulated network."""

    plan: ClusterPlan = field(kw_only=True)
    drains_until: float = field(init=False, default=inf)
    announced_at: float = field(init=False, default=-inf)  # by when the others have the announcement of its drain
    bye_sent: bool = field(init=False, default=False)

    @property
    def net(self) -> NodeNetwork:
        """The network between the nodes."""
        return self.plan.net

    def drains_within(self, drain_s: float) -> None:
        """Note that a drain begins now and may take so long."""
        self.drains_until = trio.current_time() + drain_s
        self.announced_at = trio.current_time() + min(self.section.announce_s, drain_s)

    def send_bye(self, detail: str) -> None:
        early = trio.current_time() < self.drains_until
        assert not (early and self.directory.running), "a node that drains leaves before its requests have ended"
        assert trio.current_time() >= self.announced_at, (
            "a draining node leaves before the others have its announcement"
        )
        self.bye_sent = True
        Mesh.send_bye(self, detail)

    async def _listen(self, nursery: trio.Nursery, listen: Endpoint) -> None:
        def accept(stream: trio.SocketStream) -> None:
            nursery.start_soon(self._accepted, stream)

        self.directory.address = str(listen)
        self.net.listening[str(listen)] = self.name, accept

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await Mesh.run(self, task_status=task_status)
        finally:
            if self.listen is not None:
                self.net.listening.pop(str(self.listen), None)


@define(eq=False)
class ClusterPlan:
    """The description of a cluster, as `cluster.toml` gives it."""

    net: NodeNetwork
    section: LinkSettings
    rooms: Rooms
    rng: random.Random
    releases: ReleaseDeadlines | None = None  # knows how far the clock has jumped
    node_slots: dict[str, NodeSlot] = Factory(dict)
    fronts: Sequence[str] = ("main",)  # the nodes with a gateway
    prefixes: PrefixPlan | None = None  # how requests are routed by prefix, if they are
    runs: Iterator[int] = field(factory=partial(count, 1))  # of nodes' processes

    @property
    def age_s(self) -> float:
        """The time, without the jumps of the clock."""
        return trio.current_time() - (self.releases.jumped_s if self.releases else 0.0)

    def directory(self, name: str) -> Directory:
        """Return the directory of one node."""
        required = frozenset({*self.fronts} - {name})
        return Directory(name, routes=name in self.fronts, required_peers=required)

    def links(self, name: str, publishers: NodePublishers, *, listens: bool, joins: bool) -> SimLinks:
        """Return the links of one node, and configure the nodes of the file in its directory."""
        directory = publishers.directory
        for other in [*self.fronts, *self.node_slots] if not joins else ():
            node_slot = self.node_slots.get(other)
            if other != name and not (node_slot is not None and node_slot.joins):
                listening = node_slot is None or node_slot.listens
                address = f"{other}:7400" if listening else None
                offers = [] if node_slot is None else node_slot.offers
                directory.configure(other, address, offers, routes=other in self.fronts)
        return SimLinks(
            incarnation=Incarnation(f"{name} {next(self.runs)}", int(NOON + trio.current_time())),
            name=name,
            section=self.section,
            directory=directory,
            services=publishers.serving(
                {
                    (each, Encode if here.leg is Leg.ENCODE else Generate): cast("Service", EngineService(here))
                    for each, here in directory.local.items()
                }
            ),
            listen=Endpoint(name, 7400) if listens else None,
            secret=SECRET,
            tls=None,
            new_nonce=partial(self.rng.randbytes, 32),
            chance=self.rng,
            join=(Endpoint(self.fronts[0], 7400),) if joins else (),
            dial=partial(self.net.dial, name),
            accept=self.net.accepted,
            plan=self,
        )


@define(eq=False)
class NodeLife(SmallSystem):
    """One process of a node, from its start to its end."""

    node_slot: NodeSlot = field(kw_only=True)
    directory: Directory = field(init=False)
    inboxes: list[RequestInbox] = field(init=False)
    encoding: NodeEncoders = field(init=False)
    publishers: NodePublishers = field(init=False)
    links: SimLinks = field(init=False)

    def __attrs_post_init__(self) -> None:
        SmallSystem.__attrs_post_init__(self)
        node_slot = self.node_slot
        self.directory = node_slot.plan.directory(node_slot.name)
        self.inboxes = register_workers(self, self.directory)
        self.encoding = NodeEncoders(
            self.directory, node_slot.encoders, node_slot.encoder_costs, node_slot.gallery, node_slot.plan.rng
        )
        self.publishers = NodePublishers(node_slot.plan.prefixes, self.directory, self)
        self.links = node_slot.plan.links(
            node_slot.name, self.publishers, listens=node_slot.listens, joins=node_slot.joins
        )

    @property
    def line_watches(self) -> int:
        return self.publishers.line_watches

    def children(self, *workers: Tree) -> tuple[Child | Tree, ...]:
        links = Child(name="links", run=self.links.run, stop_within_s=2.0)
        others = (*workers, *self.encoding.trees(), *self.publishers.trees)
        return in_order(gateway=(), monitoring=(), links=(links,), others=others)

    async def _engine(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        if not self.node_slot.simulated:
            await super()._engine(number, task_status=task_status)
            return
        if self.starts_fail:
            raise StartFailed("it does not start")
        engine = self.hosts[number] = LocalEngine(self.costs)
        self.transports[f"line {number}"] = cast("SimTransport", engine)
        with self.engines[number].publish(engine):
            await engine.run(task_status=task_status)

    async def _decode(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        await work(self, self.directory, self.inboxes, number, task_status=task_status)

    def check_idle(self, gone: Collection[str] = ()) -> None:
        """Check that nothing of any request is left at this node, and no link to the nodes that have `gone`."""
        if self.node_slot.simulated:
            for number, host in self.hosts.items():
                host.check_free()
                assert self.engines[number].current is host, "an engine is down"
            self.check_lives()
        else:
            self.check_engines()
        self.encoding.check_idle()
        check_links(self.directory, gone, self.node_slot.plan.prefixes)
        check_inboxes(self.directory, self.inboxes)


@define(eq=False)
class NodeSlot:
    """The place of a node in the cluster: its processes, one after the other."""

    name: str
    plan: ClusterPlan
    costs: LegCosts
    kwargs: dict[str, Any]  # of its systems
    nursery: trio.Nursery
    listens: bool = True
    joins: bool = False
    drain_s: float = 5.0
    encoders: int = 0
    encoder_costs: EncoderCosts = field(factory=EncoderCosts)
    gallery: Gallery = field(factory=Gallery)
    simulated: bool = False  # its engines are the product's own simulated ones
    start_failed: bool = False  # in one of its processes
    life: NodeLife | None = None
    lives: list[NodeLife] = Factory(list)

    @property
    def offers(self) -> list[Offer]:
        """The workers that it will have."""
        many, costs = self.kwargs["workers"], self.costs
        engines = [offer_of(f"{self.name}-{each}", costs.leg, costs) for each in range(many)]
        return engines + NodeEncoders.offers(self.name, self.encoders, self.encoder_costs)

    @property
    def host_of(self) -> Callable[[SimTransport, Costs], LegHost]:
        """The factory of its engine hosts."""
        return partial(LegHost, rooms=self.plan.rooms)

    def start(self) -> None:
        """Start a process of the node."""
        self.life = NodeLife(rng=self.plan.rng, costs=self.costs, host_of=self.host_of, node_slot=self, **self.kwargs)
        self.lives.append(self.life)
        self.nursery.start_soon(self._live, self.life, name=f"node {self.name}")

    async def _live(self, life: NodeLife) -> None:
        try:
            with life.scope:
                await supervise(life.tree, rng=self.plan.rng, on_event=life.child_events.append)
        except StartFailed:  # its engine died before the node was up; a launcher would start it again
            self.start_failed = True
            self.plan.net.cut(self.name)
            await trio.sleep(AGAIN_S)
            if self.life is life and not life.directory.draining:
                self.start()
        finally:
            life.over.set()

    async def crash(self) -> None:
        """End as a killed process does: every connection is cut without a `Bye`."""
        life, self.life = self.life, None
        assert life is not None
        self.plan.net.listening.pop(str(life.links.listen), None)
        self.plan.net.cut(self.name)
        for host in life.hosts.values():
            host.crash()
        life.scope.cancel(reason="the node is killed")
        await life.over.wait()
        self.plan.net.cut(self.name)

    async def drain(self) -> None:
        """Drain and end, as a node does on SIGTERM."""
        life, plan = self.life, self.plan
        assert life is not None
        node = bare_node(life.directory, None, life.links, self.drain_s, life.scope)
        life.links.drains_within(self.drain_s)
        drains_until = plan.age_s + self.drain_s
        async with trio.open_nursery() as node.nursery:
            node.drain("the test drains")
        assert plan.age_s <= drains_until + BYE_S + 0.01, "a drain takes longer than it may"
        assert life.links.bye_sent, "a node left without a `Bye`"
        await life.over.wait()
        assert plan.age_s <= drains_until + BYE_S + STOP_S
        self.life = None
        for host in life.hosts.values():
            host.crash()  # its process has ended with the node's
        self.plan.net.cut(self.name)


def bare_node(
    directory: Directory, gateway: Gateway | None, links: SimLinks | None, drain_s: float, tree: trio.CancelScope
) -> Node:
    """Return a node that can be drained: without a file, a terminal and processes."""
    assembly: Any = SimpleNamespace(directory=directory, gateway=gateway, links=links)
    runtime: Any = SimpleNamespace(grace=GracePeriods())
    absent: Any = None
    return Node(absent, assembly, runtime, terminal=absent, drain_s=lambda: drain_s, tree=tree)


def check_inboxes(directory: Directory, inboxes: list[RequestInbox]) -> None:
    """Check that no call waits for a worker of this node, and that no worker counts a request."""
    for inbox in inboxes:
        assert inbox.waiting == (0, 0), "a call waits"
    for here in directory.local.values():
        assert (here.load.busy, here.load.tokens, here.load.pending) == (0, 0, 0), (
            "a worker counts a request that is over"
        )


def check_tensors(peer: Peer) -> None:
    """Check that an end of a link neither sends nor receives a tensor."""
    now = peer.statistics()
    assert (now.sending_bytes, now.receiving_bytes, now.buffered_bytes) == (0, 0, 0), "a tensor is on its way"


def check_links(directory: Directory, gone: Collection[str] = (), prefixes: PrefixPlan | None = None) -> None:
    """Check that a node is linked to all others, and that nothing is open on its links but what is always open.

    While some have `gone`, it is linked to none of those; one that joins may lack links to others that it learns of.
    """
    for name, node in directory.nodes.items():
        link = node.link
        assert name not in gone or link is None, f"{directory.name} has a link to {name}, which has gone"
        if link is None and (gone or not directory.should_link(name)):
            continue
        assert link is not None, f"{directory.name} has no link to {name}"
        check_streams(link, *watches_on(directory, name, prefixes))
        check_tensors(link.peer)
