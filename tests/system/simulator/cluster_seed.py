"""One seed of a cluster: its nodes, their faults, and the checks after all faults are gone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any, ClassVar

import trio
from attrs import define, evolve, field, frozen

from actors.routing.ports import RoutingObserver
from actors.routing.route import FailoverLimits
from protocol.cluster import Leg
from supervisor.cluster.directory import Directory
from supervisor.links.link import Link
from tests.rig.small_system import SmallSystem
from tests.system.simulator.cluster import BRIEF_S, SECTION, SETTLED_S, Cluster, OfCluster, linked, others_up, together
from tests.system.simulator.cluster_single_fault import SINGLE_FAULTS
from tests.system.simulator.faults import AWAY_ERRORS, OF_NODES, Faults
from tests.system.simulator.legs import BOTH_WITHIN_S, LegCosts, Rooms
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.node_network import NodeNetwork
from tests.system.simulator.nodes import ClusterPlan, NodeSlot
from tests.system.simulator.probes import health
from tests.system.simulator.release_times import DELAYS, SWALLOWS, ReleaseDeadlines, kept_s
from tests.system.simulator.seed import CHAOS_S, DEADLINES, PENDING_PREFILL, Run, traced
from tests.system.simulator.system import LIMITS

SHAPES = (  # the legs of the nodes beside the gateway's
    (Leg.BOTH,),
    (Leg.BOTH, Leg.BOTH),
    (Leg.PREFILL, Leg.DECODE),
    (Leg.PREFILL, Leg.DECODE, Leg.BOTH),
    (Leg.PREFILL, Leg.PREFILL, Leg.DECODE),
    (Leg.PREFILL, Leg.DECODE, Leg.DECODE),
    (Leg.PREFILL, Leg.PREFILL, Leg.DECODE, Leg.DECODE),
)
KINDS = (
    "crash",
    "cut the line",
    "half-open line",
    "stuck",
    "start fails",
    "slow",
    "bugs",
    "a leg dies",
    "jump",
    *OF_NODES,
)
SINGLE_FAULT_SHARE = 0.25  # of the seeds, those with a single fault
CLUSTER_DELAYS = frozenset({"half-open link", "stopped node"})
LOOKS_MAX = 3  # at a link that has just been lost, a tenth of a second apart
NOTICED_S = 0.5  # until every node has the announcement that another one drains


@define(eq=False)
class ClusterFaults(OfCluster, Faults):
    """Injects faults at any node."""

    def __attrs_post_init__(self) -> None:
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
            or not node_slot.life.hosts
            or node_slot.life.over.is_set()
            or node_slot.life.directory.draining
        ):
            return
        self.happened.add(kind)
        self.losses += 1
        self.away += node_slot.kwargs["workers"]
        self.note(kind, node_slot.name)
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
        else:
            self.happened.add("stays away")

    async def _check_avoided(self, node_slot: NodeSlot) -> None:
        await trio.sleep(NOTICED_S)
        delayed = any(period.kind in CLUSTER_DELAYS | {"jump"} for period in self.releases.periods)
        chosen = [worker.load.name for worker in self.system.directory.workers("tiny")]
        assert delayed or not any(name.startswith(f"{node_slot.name}/") for name in chosen), (
            "a node that drains is chosen"
        )


@frozen
class Noting(RoutingObserver):
    """Records each request that is resumed by another worker."""

    note: Callable[..., None]

    def call_resumed(self, code: str, sent: int) -> None:
        self.note("resumed" if sent else "retried", code)


@define(eq=False)
class ClusterRun(OfCluster, Run):
    """One run of a cluster."""

    fronts: ClassVar[Sequence[str]] = ("main",)
    single_fault_share: ClassVar[float] = SINGLE_FAULT_SHARE
    nursery: trio.Nursery = field(kw_only=True)
    shape: dict[str, Any] = field(init=False, factory=dict)  # of a single fault
    front_ends: str | None = field(init=False)
    new_front: Callable[[], Cluster] = field(init=False)

    def __attrs_post_init__(self) -> None:
        rng = self.rng
        self.clients = rng.randint(2, 9)
        self.front_ends = rng.choice((None, None, None, None, None, None, "drain", "crash"))
        self.drains = self.front_ends == "drain"
        self.times = {kind: rng.choice((0, 0, 0, 1, 2)) for kind in KINDS} if rng.random() < 0.9 else {}
        if rng.random() < 0.7:
            self.times.pop("jump", None)
        self.single_fault = rng.choice(SINGLE_FAULTS) if rng.random() < self.single_fault_share else None
        self.single_fault = self.only or self.single_fault
        if self.single_fault is not None:
            self.clients, self.front_ends, self.drains, self.times = 0, None, False, {}
            self.shape = self.single_fault.shape(rng)
        self.new_front = self._system()
        self.system = self.new_front()
        self.system.routing.observer = Noting(self.note)
        self.faults = self.new_faults()
        self._small_limits()
        self._expect_falls()

    def new_faults(self) -> ClusterFaults:
        """Return what injects the faults."""
        return ClusterFaults(self.system, self.rng, self.note)

    def _costs(self, leg: Leg = Leg.BOTH, node: str = "main") -> LegCosts:
        rng = self.rng
        costs = LegCosts(
            slots=rng.randint(1, 3),
            step_s=rng.choice((0.02, 0.05, 0.1)),
            prefill_s=rng.choice((0.0, 0.0002, 0.002)),
            release_s=rng.choice((0.0, 0.01, 0.5)),
            vocabulary_size=VOCABULARY,
            leg=leg,
            node=node,
        )
        costs.pending_prefill_max = PENDING_PREFILL[costs.step_s]
        return costs

    def _system(self) -> Callable[[], Cluster]:  # type: ignore[override]
        """Draw the nodes; return what makes the gateway's, as often as that one begins."""
        rng = self.rng
        network = {
            "delay_s": rng.choice((0.0, 0.002, 0.05)),
            "piece_max": rng.choice((40, 1000, 65536)),
            "room": rng.choice((4096, 65536)),
        }
        section = evolve(SECTION, streams_max=rng.choice((8, 64)))
        rooms = Rooms(transfer_s=rng.choice((0.0, 0.3, 1.0)))
        plan = ClusterPlan(NodeNetwork(rng, network), section, rooms, rng, fronts=self.fronts)
        shape = self.shape.pop("legs", None) or rng.choice(SHAPES)
        deadlines = self.shape.get("deadlines", DEADLINES)
        kwargs = {"inbox_size": rng.randint(1, 3), "deadlines": deadlines, "network": network}
        not_listening = rng.choice((None, None, *range(len(shape))))
        for number, leg in enumerate(shape):
            name = f"{rng.choice('az')}{number}"  # it dials the gateway's node, or is dialed by it
            plan.node_slots[name] = NodeSlot(
                name,
                plan,
                self._costs(leg, name),
                kwargs | {"workers": rng.choice((1, 1, 2)) if self.single_fault is None else 1},
                self.nursery,
                listens=number != not_listening,
                joins=number != not_listening and rng.random() < 0.2,
                drain_s=rng.choice((0.2, 5.0)),
                simulated=leg is Leg.BOTH and rng.random() < 0.7 and not self.shape.get("fake"),
            )
        self.shape.pop("fake", None)
        drawn: dict[str, Any] = dict(
            rng=rng,
            numbers=count(1),
            rooms=count(1),
            refused=set(),
            plan=plan,
            costs=self._costs(),
            workers=rng.choice((0, 0, 0, 1)),
            prefill_tokens_min=rng.choice((0, 0, 45)),
            limits=evolve(LIMITS, backlog_bytes_max=100_000),
            requests_max=rng.choice((3, 8, 16)),
            waiting_max=16,
            admit_s=100.0,
            first_token_s=rng.choice((200.0, 200.0, 3.0)),
            total_s=300.0,
            drain_s=rng.choice((1.0, 10.0, 60.0)),
            route=FailoverLimits(
                resumes_max=rng.choice((1, 3, 20)),
                crashes_max=rng.choice((1, 1, 3)),
                resume_s=rng.choice((10.0, 100.0)),
            ),
            **kwargs,
        )
        return partial(Cluster, **drawn | self.shape)

    async def watch_legs(self) -> None:
        """Check that no leg continues for long without the other."""
        rooms, releases = self.cluster.plan.rooms, self.faults.releases
        while True:
            for number, room, gone in rooms.lonely():
                assert room.alone_since is not None
                within_s = BOTH_WITHIN_S + max(engine.live.release_s for engine in room.legs.values())
                due_at = room.alone_since + within_s
                if releases.periods:
                    due_at = max(due_at, releases.due(room.alone_since, 0.0)[0])
                assert trio.current_time() <= due_at, (
                    f"in room {number} ({room.request.id}) the {gone.value} has ended, and the other continues"
                )
            await trio.sleep(0.1)

    async def watch_links(self) -> None:
        """Check that no node keeps a lost link, even while its calls are still being ended.

        A node that ends is left out: it is cancelled, and sends no requests.
        """
        lost: Counter[tuple[str, str, Link]] = Counter()
        while True:
            stay = [own for own in self.directories() if not own.draining]
            links = ((own.name, name, node.link) for own in stay for name, node in own.nodes.items() if node.link)
            lost = Counter({link: lost[link] + 1 for link in links if link[2].lost})
            for (own, peer, _), looks in lost.items():
                assert looks < LOOKS_MAX, f"{own} keeps a link to {peer} that is lost"
            await trio.sleep(0.1)

    def directories(self) -> list[Directory]:
        """Return the directory of each node that is up."""
        return self.cluster.directories

    async def chaos(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch_legs)
            nursery.start_soon(self.watch_links)
            async with trio.open_nursery() as ends:
                if self.front_ends == "crash":
                    ends.start_soon(self._crash)
                await Run.chaos(self)
            nursery.cancel_scope.cancel()

    async def _crash(self) -> None:
        await trio.sleep(1 + self.rng.random() * 3)
        self.faults.happened.add("front crash")
        self.note("front crash")
        await self.cluster.crash()

    async def all(self) -> None:
        """Check safety while faults are injected, then remove them and check liveness."""
        self._note_nodes()
        with others_up(self.cluster):
            async with together(self.cluster) as system:
                with trio.fail_after(CHAOS_S):
                    await self.chaos()
                await trio.sleep(SETTLED_S)
                if self.front_ends is None:
                    await self._liveness(system)
            if self.front_ends is not None:
                system.check_nothing_is_left()
                await self._begin_again(system)

    def _note_nodes(self) -> None:
        self.note(
            *(
                f"{node_slot.costs.leg.value} {node_slot.name}{' simulated' * node_slot.simulated}"
                for node_slot in self.cluster.node_slots
            )
        )

    async def _begin_again(self, before: Cluster) -> None:
        """Start the gateway's node again, and check its liveness."""
        self.system = again = self.new_front()
        again.faults = before.faults
        again.routing.observer = Noting(self.note)
        again.heal()
        async with together(again):
            await self._liveness(again)

    async def _liveness(self, system: Cluster) -> None:
        system.heal()
        await trio.sleep(SETTLED_S)
        assert linked(system), "nodes that are up are not linked"
        await health(system)
        await trio.sleep(BRIEF_S)
        await system.check_at_rest()
        await system.check_serves()
        self.note("at rest", system.plan.rooms.met, [list(host.scheduler.log) for host in system.all_hosts()])


async def whole_cluster(rng: random.Random) -> str:
    async with trio.open_nursery() as nursery:
        return await ClusterRun(rng, nursery=nursery).traced()


@cache
def run_cluster_seed(seed: int) -> str:
    """Run one seed of a cluster without logs; return its trace."""
    return traced(whole_cluster, seed)
