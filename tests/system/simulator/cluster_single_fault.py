"""Single faults in a cluster, and what they may cost the clients of its gateway."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import trio
from attrs import define, evolve, field

from actors.routing.policies.least_loaded import least_loaded
from actors.routing.route import FailoverLimits
from protocol.errors import HandOffFailed, InternalError
from protocol.messages.cluster import Leg
from supervisor.links.endpoint import Endpoint
from supervisor.supervision.supervise import supervise
from tests.system.simulator.cluster import SECTION, OfCluster
from tests.system.simulator.legs import LegScheduler
from tests.system.simulator.nodes import NodeLife
from tests.system.simulator.seed import DEADLINES
from tests.system.simulator.single_fault import PATIENT, SOON_S, FailingEngine, HonestClient, SingleFault, ejection

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

    from supervisor.cluster.directory import Directory
    from supervisor.links.link import Link
    from tests.rig.fake_engine import Scheduler
    from tests.system.simulator.nodes import NodeSlot

TWO_OF_SOME = (  # legs of which there is another to go to
    (Leg.BOTH, Leg.BOTH),
    (Leg.PREFILL, Leg.PREFILL, Leg.DECODE),
    (Leg.PREFILL, Leg.DECODE, Leg.DECODE),
    (Leg.PREFILL, Leg.PREFILL, Leg.DECODE, Leg.DECODE),
)
TWO_OF_ALL = (TWO_OF_SOME[0], TWO_OF_SOME[-1])
TOKENS_MAX = 24
CLIENTS = 2  # for which one worker, or one pair, is enough
CROWD = 8  # for which one is not enough


def shape(rng: random.Random, legs: tuple[tuple[Leg, ...], ...]) -> dict[str, object]:
    """Return the shape of a cluster with a single fault: its nodes, one worker each, and long deadlines."""
    return PATIENT | {"legs": rng.choice(legs), "workers": 0, "route": FailoverLimits(ejection=ejection(rng))}


@define(eq=False)
class ClusterFailingEngine(OfCluster, FailingEngine):
    """An engine of any leg that fails every request at once while others of its leg work."""

    node_slot: NodeSlot = field(init=False)

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return shape(rng, TWO_OF_SOME) | {"fake": True}

    def __attrs_post_init__(self) -> None:
        node_slots = self.cluster.node_slots
        legs = [node_slot.costs.leg for node_slot in node_slots]
        self.node_slot = self.rng.choice([node_slot for node_slot in node_slots if legs.count(node_slot.costs.leg) > 1])

    @property
    def clients(self) -> int:
        return len(self.cluster.node_slots)

    @property
    def capacity(self) -> int:
        return self.node_slot.costs.slots + max(1, self.system.inbox_size)

    def begin(self) -> Scheduler:
        assert self.node_slot.life is not None
        scheduler: Scheduler = self.node_slot.life.hosts[0].scheduler
        scheduler.fails = InternalError("the engine fails everything")
        self.note("at", self.node_slot.name)
        return scheduler


@define(eq=False)
class FailedHandOffs(ClusterFailingEngine):
    """An engine whose transfers of KV caches fail, while other pairs work."""

    kind: ClassVar[str] = "failed hand-offs"

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return shape(rng, TWO_OF_SOME[1:]) | {"fake": True}

    @property
    def pairs(self) -> int:  # type: ignore[override]
        others = Leg.DECODE if self.node_slot.costs.leg is Leg.PREFILL else Leg.PREFILL
        return sum(node_slot.costs.leg is others for node_slot in self.cluster.node_slots)

    def begin(self) -> Scheduler:
        assert self.node_slot.life is not None
        scheduler: LegScheduler = self.node_slot.life.hosts[0].scheduler
        self.cluster.plan.rooms.failing = scheduler, HandOffFailed("the KV cache did not come")
        self.note("at", self.node_slot.name)
        return scheduler

    def end(self, scheduler: Scheduler) -> None:
        self.cluster.plan.rooms.failing = None


@define(eq=False)
class SingleNodeFault(OfCluster, SingleFault):
    """A fault of a node, during which clients must get every answer complete."""

    node_slot: NodeSlot = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.node_slot = self.rng.choice(self.cluster.node_slots)

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        # A leg fails if the other was not requested within this time: no gateway is stopped for so long.
        return shape(rng, TWO_OF_ALL) | {"deadlines": evolve(DEADLINES, first_token_s=2 * SECTION.stalled_s)}

    @abstractmethod
    async def go_wrong(self) -> None:
        """Inject the fault for a while, and check how the nodes react."""

    @property
    @abstractmethod
    def within_s(self) -> float:
        """How much longer than usual an answer may take."""

    def link(self, directory: Directory | None = None, to: str | None = None) -> Link:
        """Return the gateway's link to the node of the fault, or another link."""
        nodes = (directory or self.system.directory).nodes
        link = nodes[to or self.node_slot.name].link
        assert link is not None
        return link

    async def live(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._stay, self.honest(f"h{number}"))
            await trio.sleep(self.rng.random())
            await self.go_wrong()
            await trio.sleep(SOON_S)
            nursery.cancel_scope.cancel()
        self.system.routing.policy = least_loaded  # `kv` may leave them all to the worker that has their beginnings
        async with trio.open_nursery() as nursery:
            for number in range(CROWD):
                nursery.start_soon(self._come, self.honest(f"c{number}"))
            await self._until_asked()
            nursery.cancel_scope.cancel()
        self.note("well again")

    async def _stay(self, client: HonestClient) -> None:
        one_s = (
            TOKENS_MAX
            * max(node_slot.costs.step_s + node_slot.costs.prefill_s for node_slot in self.cluster.node_slots)
            + 1.0
        )
        while True:
            outcome, took_s = await client.ask(self.rng.randint(1, TOKENS_MAX))
            assert outcome == "whole", f"the fault costs an answer: {outcome}"
            most_s = self.within_s + (1 + CLIENTS) * one_s + SOON_S
            assert took_s <= most_s, f"with the fault an answer took {took_s} s, not {most_s} s"

    async def _come(self, client: HonestClient) -> None:
        client.crowds = True
        while True:
            await client.ask(self.rng.randint(1, TOKENS_MAX))
            await trio.sleep(0.1)

    async def _until_asked(self) -> None:
        """Wait until the node gets another request."""
        assert self.node_slot.life is not None
        log = self.node_slot.life.hosts[0].scheduler.log
        before = _submitted(log)
        with trio.fail_after(10 * SOON_S):
            while _submitted(log) == before:  # noqa: ASYNC110  # of an engine's log
                await trio.sleep(0.1)


@define(eq=False)
class Stopped(SingleNodeFault):
    """A node's process that is stopped for a while, and whose kernel acknowledges what it is sent."""

    gateway: bool = field(init=False)
    lasts_s: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        SingleNodeFault.__attrs_post_init__(self)
        longest_s = SECTION.stalled_s - 2 * SECTION.heartbeat_s
        self.gateway = self.rng.random() < 0.4
        shorter, longer = (2.0, SECTION.silent_s + 2.0, longest_s), (2.0, longest_s, SECTION.stalled_s + 5.0)
        self.lasts_s = self.rng.choice(shorter if self.gateway else longer)

    @property
    def within_s(self) -> float:
        # A stopped gateway sends its requests afterwards; those of a stopped worker are taken over by others.
        return self.lasts_s if self.gateway else min(self.lasts_s, SECTION.silent_s + SECTION.heartbeat_s)

    async def go_wrong(self) -> None:
        net, until = self.cluster.plan.net, trio.current_time() + self.lasts_s
        before = self.link()
        name = "main" if self.gateway else self.node_slot.name
        self.note("stands still", name, self.lasts_s)
        self.faults.releases.wrong("stopped node", self.lasts_s)
        if self.gateway:  # its tasks continue here, but their output is held back
            net.mute(name, until)
        else:
            net.stop(name, until)
        await trio.sleep(min(self.lasts_s, SECTION.silent_s + SECTION.heartbeat_s))
        if self.lasts_s > SECTION.silent_s + SECTION.heartbeat_s:
            assert self.node_slot.life is not None
            link = self.link(directory=self.node_slot.life.directory, to="main") if self.gateway else before
            assert link.stalled, "the silence was not noticed"
        await trio.sleep_until(until + SECTION.heartbeat_s)
        if self.lasts_s < SECTION.stalled_s:
            assert not before.lost, "a link was lost though the kernel at its other end answers"
            assert self.link() is before
        else:
            assert before.lost, "a node that is stopped for too long keeps its link"


@define(eq=False)
class Twin(SingleNodeFault):
    """A second process of a node's name, which dials or is dialed."""

    within_s = 0.0

    async def go_wrong(self) -> None:
        system, node_slot, rng = self.cluster, self.node_slot, self.rng
        before, address = self.link(), Endpoint(f"{node_slot.name}-again", 7400)
        is_dialed = rng.random() < 0.5
        lasts_s = 1 + rng.random() * 5
        self.note("a twin", node_slot.name, "is dialed" if is_dialed else "dials", lasts_s)
        async with self._twin(address if is_dialed else None) as twin, trio.open_nursery() as nursery:
            if is_dialed:  # as it would be if the gateway's file said to join there
                nursery.start_soon(system.links.keep_linked, None, address)
            with trio.fail_after(SOON_S):
                while "main" not in twin.directory.name_conflicts:  # noqa: ASYNC110  # of links
                    await trio.sleep(0.05)
            await trio.sleep(lasts_s)
            assert self.link() is before, "the older process lost its link"
            assert not before.lost
            # A twin that dials is refused each time; one that was dialed is not dialed again while the older is linked.
            assert is_dialed or twin.directory.name_conflict is not None, (
                "the younger process does not report the conflict"
            )
            reasons = system.links.node_log.reasons()
            assert any(reason.startswith("two processes call themselves") for reason in reasons), (
                "the log has no reason"
            )
            assert not any(_submitted(host.scheduler.log) for host in twin.hosts.values()), "the younger got requests"
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _twin(self, listens: Endpoint | None) -> AsyncIterator[NodeLife]:
        """Run a second process of the node's name for the body; without an address it dials the others."""
        node_slot, plan = self.node_slot, self.node_slot.plan
        life = NodeLife(
            rng=plan.rng, costs=node_slot.costs, host_of=node_slot.host_of, node_slot=node_slot, **node_slot.kwargs
        )
        life.links.listen = listens
        life.links.join = () if listens else (Endpoint(plan.fronts[0], 7400),)
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with life.scope:
                    await supervise(life.tree, rng=plan.rng, on_event=life.child_events.append)
                life.over.set()

            nursery.start_soon(run, name=f"twin of {node_slot.name}")
            yield life
            life.scope.cancel(reason="the twin is ended")
            await life.over.wait()
            for host in life.hosts.values():
                host.crash()


def _submitted(log: list[str]) -> int:
    return sum(line.startswith("submit") for line in log)


SINGLE_FAULTS: tuple[type[SingleFault], ...] = (ClusterFailingEngine, FailedHandOffs, Stopped, Twin)
