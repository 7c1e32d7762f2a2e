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
from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from supervisor.cluster.directory import Directory
from supervisor.links.link import Link
from tests.rig.small_system import LONG_S
from tests.system.simulator.cluster import BRIEF_S, SECTION, SETTLED_S, Cluster, OfCluster, linked, others_up, together
from tests.system.simulator.cluster_faults import CLUSTER_DELAYS, ClusterFaults
from tests.system.simulator.cluster_single_fault import SINGLE_FAULTS as CLUSTER_SINGLE_FAULTS
from tests.system.simulator.fault_plan import NO_PLAN, SHAPES, plan_cluster
from tests.system.simulator.faults import CLUSTER_FAULTS
from tests.system.simulator.frozen_legs import FrozenLeg
from tests.system.simulator.full_pools import FullPool
from tests.system.simulator.legs import BOTH_WITHIN_S, LegCosts, Rooms
from tests.system.simulator.lost_encoders import LostEncoder
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.node_network import NodeNetwork
from tests.system.simulator.nodes import ClusterPlan, NodeSlot
from tests.system.simulator.operated_legs import OperatedLegs
from tests.system.simulator.picture_faults import PICTURE_FAULTS, UNDER_A_TENSOR
from tests.system.simulator.pictured import Sight, draw_sight, encoder_costs
from tests.system.simulator.prefix_plan import aside, draw_canary, draw_prefixes
from tests.system.simulator.probes import health
from tests.system.simulator.programs import STREAMS, allow_all, draw_operators
from tests.system.simulator.seed import CHAOS_S, DEADLINES, PENDING_PREFILL, Run, traced
from tests.system.simulator.single_fault import SingleFault
from tests.system.simulator.system import LIMITS

SINGLE_FAULTS: tuple[type[SingleFault], ...] = (*CLUSTER_SINGLE_FAULTS, LostEncoder, FrozenLeg, FullPool, OperatedLegs)
SINGLE_FAULT_SHARE = 0.25  # of the seeds, those with a single fault
BLIND = Sight(None, 0, {})
LOOKS_MAX = 3  # at a link that has just been lost, a tenth of a second apart


@frozen
class Noting(RoutingObserver):
    """Records each request that is resumed by another worker."""

    note: Callable[..., None]
    may_divert: Callable[[], bool]

    def diverted(self, pool: str, actual: str) -> None:
        assert self.may_divert(), f"a request of {pool} is asked in {actual}, and nothing has happened to its own"
        self.note("diverted", pool, actual)

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
        rng, self.aside = self.rng, aside(self.rng)
        self.operators = draw_operators(self.aside, planned=self.plan.operated)
        self.clients = rng.randint(2, 9)
        self.front_ends = rng.choice((None, None, None, None, None, None, "drain", "crash"))
        self.drains = self.front_ends == "drain"
        self.times = {kind: rng.choice((0, 0, 0, 1, 2)) for kind in CLUSTER_FAULTS} if rng.random() < 0.9 else {}
        self.picture_times = {kind: rng.choice((0, 0, 0, 0, 0, 1, 2)) for kind in (*PICTURE_FAULTS, *UNDER_A_TENSOR)}
        if rng.random() < 0.7:
            self.times.pop("jump", None)
        share = self.single_fault_share if self.plan is NO_PLAN else 0.0
        self.single_fault = rng.choice(SINGLE_FAULTS) if rng.random() < share else None
        self.single_fault = self.only or self.single_fault
        self._follow_plan()
        if self.single_fault is not None:
            self.clients, self.front_ends, self.drains, self.times, self.picture_times = 0, None, False, {}, {}
            self.operators = None
            self.shape = self.single_fault.shape(rng)
        self.new_front = self._system()
        self.system = self.new_front()
        self.faults = self.new_faults()
        self.system.routing.observer = self.observer()
        self._small_limits()
        self._expect_falls()
        self._excuse_lags()

    def _follow_plan(self) -> None:
        super()._follow_plan()
        if self.plan is not NO_PLAN:
            self.front_ends, self.drains = self.plan.front_ends, self.plan.front_ends == "drain"
            self.shape |= {"legs": self.plan.legs} if self.plan.legs else {}

    def _excuse_lags(self) -> None:
        """Let routers lag while a node stands still, too: by its old blocks it is chosen again once it is linked."""
        super()._excuse_lags()
        if (plan := self.system.prefixes) is not None:
            late, after_s = plan.caches.late, 2 * SECTION.retry_max_s + plan.caches.lag_s
            plan.caches.late = lambda: late() or self.faults.releases.lately(CLUSTER_DELAYS, after_s)

    def observer(self) -> Noting:
        """Return what observes the routing of a gateway."""
        return Noting(self.note, lambda: bool(self.faults.happened or self.single_fault))

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
        operated = self.operators is not None or "operated" in self.shape
        if operated:
            section = evolve(section, streams_max=STREAMS)
        rooms = Rooms(transfer_s=rng.choice((0.0, 0.3, 1.0)))
        prefixes = draw_prefixes(self.aside, network["delay_s"], tight=self.single_fault is None)
        plan = ClusterPlan(NodeNetwork(rng, network), section, rooms, rng, fronts=self.fronts, prefixes=prefixes)
        sight = (
            draw_sight(rng, needed=bool(self.plan.picture_faults))
            if self.single_fault is None
            else self.shape.pop("sight", BLIND)
        )
        shape = self.shape.pop("legs", None) or rng.choice(SHAPES)
        deadlines = self.shape.get("deadlines", DEADLINES)
        canary = draw_canary(self.aside) if self.single_fault is None else self.shape.pop("canary", None)
        rooms.hand_off = self.aside.choice((HandOff.CONCURRENT, HandOff.SEQUENTIAL))
        kwargs: dict[str, Any] = {"canary": canary}
        kwargs |= {"inbox_size": rng.randint(1, 3), "deadlines": deadlines, "network": network}
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
        here = self._place_encoders(plan, sight, kwargs)
        costs = self._costs()
        for each in (costs, *(node_slot.costs for node_slot in plan.node_slots.values())):
            each.hand_off = rooms.hand_off
            sight.open(each)
            if prefixes is not None:
                prefixes.apply(each)
            if operated:
                allow_all(each)
        drawn: dict[str, Any] = dict(
            rng=rng,
            numbers=count(1),
            rooms=count(1),
            refused=set(),
            plan=plan,
            prefixes=prefixes,
            costs=costs,
            encoders=here,
            operated=operated,
            workers=rng.choice((0, 0, 0, 1)),
            prefill_tokens_min=rng.choice((0, 0, 45)),
            pooled=self.single_fault is None and sum(map(ord, "".join(plan.node_slots))) % 2 == 0,
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
        return partial(Cluster, **drawn | sight.fields | self.shape)

    def _place_encoders(self, plan: ClusterPlan, sight: Sight, kwargs: dict[str, Any]) -> int:
        """Place encoders on nodes of their own and beside engines; return how many are on the gateway's node."""
        rng, here = self.rng, 0
        for number in range(sight.encoders):
            places = ("alone", "alone", "beside", "here" if len(self.fronts) == 1 else "alone")
            match rng.choice(places) if self.single_fault is None else "alone":
                case "here":
                    here += 1
                case "beside":
                    rng.choice(list(plan.node_slots.values())).encoders += 1
                case _:
                    name = f"{rng.choice('az')}e{number}"
                    costs, own = self._costs(Leg.ENCODE, name), kwargs | {"workers": 0}
                    drain_s = rng.choice((0.2, 5.0))
                    plan.node_slots[name] = NodeSlot(name, plan, costs, own, self.nursery, encoders=1, drain_s=drain_s)
        for node_slot in plan.node_slots.values():
            node_slot.encoder_costs = encoder_costs(rng)
        return here

    @property
    def settled_s(self) -> float:
        """How long after the last fault every node has released everything; a last canary may wait in a slow engine."""
        return SETTLED_S if self.system.canary is None else LONG_S

    async def watch_legs(self) -> None:
        """Check that no leg continues for long without the other."""
        rooms, releases = self.cluster.plan.rooms, self.faults.releases
        while True:
            for number, room, gone in rooms.lonely():
                assert room.alone_since is not None
                # A frozen prefill holds the state of an answer that is whole. The seed checks when it is replaced.
                if any(engine.frozen for engine in room.legs.values()):
                    continue
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
                system.end_canaries()
                await trio.sleep(self.settled_s)
                await system.put_all_right()
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
        again.routing.observer = self.observer()
        again.heal()
        async with together(again):
            await self._liveness(again)

    async def _liveness(self, system: Cluster) -> None:
        system.heal()
        await system.wait_trusted()
        await trio.sleep(SETTLED_S)
        assert linked(system), "nodes that are up are not linked"
        await health(system)
        await trio.sleep(BRIEF_S)
        await system.check_at_rest()
        await system.check_serves()
        self.note("at rest", system.plan.rooms.met, [list(host.scheduler.log) for host in system.all_hosts()])
        self._note_prefixes()


@cache
def run_cluster_seed(seed: int, *, planned: bool = False) -> str:
    """Run one seed of a cluster without logs, with the faults that are dealt to it if they are planned; return its trace."""
    plan = plan_cluster(seed) if planned else NO_PLAN

    async def whole_cluster(rng: random.Random) -> str:
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, plan=plan, nursery=nursery).traced()

    return traced(whole_cluster, seed)
