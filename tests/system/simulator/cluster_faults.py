"""Faults of a cluster: of its engines and encoders, its nodes, and the links between them."""

from __future__ import annotations

import trio
from attrs import define, field

from protocol.messages.cluster import Leg
from tests.rig.small_system import SmallSystem
from tests.system.simulator.cluster import SECTION, OfCluster
from tests.system.simulator.encoders import NodeEncoders
from tests.system.simulator.faults import ALLOWED_ERRORS, AWAY, AWAY_ERRORS, OF_NODES, Faults
from tests.system.simulator.nodes import NodeSlot
from tests.system.simulator.picture_faults import UNDER_A_TENSOR, PictureFaults
from tests.system.simulator.release_times import DELAYS, SWALLOWS, ReleaseDeadlines, kept_s

CLUSTER_DELAYS = frozenset({"half-open link", "stopped node"})
LOOK_S, LOOKS_S = 0.005, 2.0  # at links, for tensors on their way
NOTICED_S = 0.5  # until every node has the announcement that another one drains, on a network without delay
DELAYS_MAX = (
    10  # usual delays of the network that the last of the many pieces of a tensor, and what follows it, may have
)


@define(eq=False)
class ClusterPictureFaults(OfCluster, PictureFaults):
    """Injects faults of the encoders of any node."""

    faults: ClusterFaults = field(kw_only=True)

    def nodes(self) -> list[NodeEncoders]:
        return self.cluster.encoding_up

    async def one(self, kind: str) -> None:
        if kind not in UNDER_A_TENSOR:
            await super().one(kind)
            return
        await trio.sleep(self.rng.random() * 3)
        with trio.move_on_after(LOOKS_S):
            while (node_slot := self._crossed()) is None:  # noqa: ASYNC110  # of many links
                await trio.sleep(LOOK_S)
            self.note(kind, node_slot.name)
            await self.faults.befall(UNDER_A_TENSOR[kind], node_slot)

    def _crossed(self) -> NodeSlot | None:
        """Return a node whose link to a gateway has a part of a tensor on its way."""
        for node_slot in self.cluster.node_slots:
            nodes = () if node_slot.life is None else node_slot.life.directory.nodes.values()
            for link in (node.link for node in nodes if node.link is not None):
                now = link.peer.statistics()
                if now.receiving_bytes or now.in_flight_bytes:
                    return node_slot
        return None


@define(eq=False)
class ClusterFaults(OfCluster, Faults):
    """Injects faults at any node."""

    def _picture_faults(self) -> PictureFaults:
        return ClusterPictureFaults(self.system, self.rng, self.note, ALLOWED_ERRORS, faults=self)

    def __attrs_post_init__(self) -> None:
        self.pictures = self._picture_faults()
        delays, swallows = DELAYS | CLUSTER_DELAYS, SWALLOWS | CLUSTER_DELAYS
        self.releases = ReleaseDeadlines(kept_s(self.system.deadlines), delays, swallows=swallows)
        self.cluster.plan.releases = self.releases

    def choose_node(self) -> SmallSystem:
        return self.rng.choice(self.cluster.nodes_up)

    @property
    def resume_may_fail(self) -> bool:
        start_failed = any(node_slot.start_failed for node_slot in self.cluster.node_slots)
        return super().resume_may_fail or start_failed or self.releases.jumped_s > 0

    def may(self, code: str) -> bool:
        jumped = (
            self.releases.jumped_s > 0 and code in AWAY_ERRORS
        )  # for each end the other is silent since before the jump
        return jumped or Faults.may(self, code)

    @property
    def routes(self) -> int:
        many = dict.fromkeys(Leg, 0)
        many[Leg.BOTH] += self.system.workers
        for node_slot in self.cluster.node_slots:
            many[node_slot.costs.leg] += node_slot.kwargs["workers"]
        return many[Leg.BOTH] + min(many[Leg.PREFILL], many[Leg.DECODE])

    async def one(self, kind: str) -> None:
        system, rng = self.cluster, self.rng
        if kind == "a leg dies":
            await trio.sleep(rng.random() * 3)
            await self._kill_leg()
            return
        if kind not in OF_NODES:
            await trio.sleep(rng.random() * 3)
            if system.nodes_up and all(node.hosts for node in system.nodes_up):
                await self.now(kind)
            return
        await trio.sleep(rng.random() * 5)
        busy = [
            node_slot
            for node_slot in system.node_slots
            if node_slot.life is not None and node_slot.life.directory.running
        ]
        node_slot = rng.choice(busy or system.node_slots)
        if (
            node_slot.life is None
            or not (node_slot.life.hosts or node_slot.life.encoding.engines)
            or node_slot.life.over.is_set()
            or node_slot.life.directory.draining
        ):
            return
        self.note(kind, node_slot.name)
        await self.befall(kind, node_slot)

    async def befall(self, kind: str, node_slot: NodeSlot) -> None:
        """Let a fault befall a node, and remove it later; requests without pictures do without encoders."""
        if node_slot.kwargs["workers"]:
            self.happened.add(kind)
            self.losses += 1
            self.away += node_slot.kwargs["workers"]
        if node_slot.encoders:
            self.pictures.lost(kind, away=kind in AWAY)
        await self._wrong(kind, node_slot)

    async def _kill_leg(self) -> None:
        """Crash the engine of one leg while it computes a request of two legs."""
        rng, stage = self.rng, self.rng.choice((0.0, 0.05, 0.2, 1.0))
        with trio.move_on_after(5.0):
            while not self.cluster.plan.rooms.held():  # noqa: ASYNC110  # of many engines
                await trio.sleep(0.05)
            await trio.sleep(stage)
            legs = self.cluster.plan.rooms.held()
            if legs:
                leg, engine = rng.choice(legs)
                self.happened.add("a leg dies")
                self.losses += 1
                self.away += 1
                self.deaths += 1
                self.note("a leg dies", leg.value, stage)
                for host in list(self.cluster.all_hosts()):
                    if host.scheduler is engine:
                        host.crash()

    def front_of_fault(self) -> str:
        """Return the gateway's node to which a link is cut."""
        return "main"

    async def _wrong(self, kind: str, node_slot: NodeSlot) -> None:
        rng, net = self.rng, self.cluster.plan.net
        nodes = node_slot.name, self.front_of_fault()
        match kind:
            case "cut a link":
                net.cut(*nodes)
            case "half-open link":
                self.releases.wrong(kind, SECTION.silent_s)
                for transport in net.transports(*nodes):
                    transport.swallow()
            case "stopped node":
                lasts_s = rng.random() * 6
                self.releases.wrong(kind, lasts_s)  # its kernel answers: it keeps what it has been asked for
                net.stop(node_slot.name, trio.current_time() + lasts_s)
            case "node crash":
                await node_slot.crash()
                await self._back(node_slot)
            case "node drain":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._check_avoided, node_slot)
                    await node_slot.drain()
                await self._back(node_slot)

    async def _back(self, node_slot: NodeSlot) -> None:
        if self.rng.random() < 0.7:
            await trio.sleep(self.rng.random() * 3)
            self.note("back", node_slot.name)
            node_slot.start()
            return
        if node_slot.kwargs["workers"]:
            self.happened.add("stays away")
        if node_slot.encoders:
            self.pictures.lost("stays away", away=True)

    async def _check_avoided(self, node_slot: NodeSlot) -> None:
        usual_delay_s = self.cluster.plan.net.network["delay_s"]
        await trio.sleep(NOTICED_S + DELAYS_MAX * usual_delay_s)
        delayed = any(period.kind in CLUSTER_DELAYS | {"jump"} for period in self.releases.periods)
        chosen = [worker.load.name for worker in self.system.directory.workers("tiny")]
        assert delayed or not any(name.startswith(f"{node_slot.name}/") for name in chosen), (
            "a node that drains is chosen"
        )
