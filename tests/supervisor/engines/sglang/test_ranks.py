"""An engine that spans nodes: all ranks run or none, whichever ends first, and never two hosts of one rank."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from attrs import Factory, define, field
from trio.testing import MockClock

from actors.kit.calls import Address, mailbox
from protocol.errors import BadRequest, EngineDied, PeerLost, StartFailed
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.engine import Done
from protocol.messages.operations import RankStarted, RunRank
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.sglang.ranks import FollowerRanks, LocalRank, run_follower_rank
from supervisor.engines.work import request_inbox
from supervisor.links.link import Link
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.registration import Registration
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import Backoff, Child, Tree
from tests.rig.scheduler import sweep
from tests.system.simulator import SimTransport, counting, sim_pair

LOAD_S, LADDER_S = 2.0, 1.0  # of a host: until it is ready once all have met, and from its end's beginning to its end
LINKED_WITHIN_S = 60.0
PORTS = (None, *range(9000, 9032))  # that nodes b and c allow the engine
AGREED = {"slots": "16", "nodes": '["a","b","c"]'}


@define(eq=False)
class Hosts:
    """The hosts of all ranks: they find each other through rank 0, but do not notice when one of them ends."""

    alive: dict[int, object] = Factory(dict)
    met: dict[int, object] = Factory(dict)  # those that have found the present rank 0
    ends: dict[int, trio.Event] = Factory(dict)
    log: list[tuple[float, str]] = Factory(list)
    ports: dict[int, int | None] = Factory(dict)  # of the hosts alive, by rank
    ladder_s: dict[int, float] = Factory(lambda: dict.fromkeys(range(3), LADDER_S))
    registration: Registration[Any] = Factory(Registration)
    changed: trio.lowlevel.ParkingLot = Factory(trio.lowlevel.ParkingLot)

    async def keep(
        self, rank: int, port: int | None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Do what keeps one rank's host in a node."""
        await trio.lowlevel.checkpoint()
        assert rank not in self.alive, "two hosts of one rank"
        life = self.alive[rank] = object()
        self.ends[rank] = trio.Event()
        self.ports[rank] = port
        self.record(f"{rank} starts")
        if rank == 0:
            self.met = dict(self.alive)  # even one that is being ended still finds the others
        elif 0 in self.alive:
            assert rank not in self.met, "a rank of an earlier life has met this rank 0"
            self.met[rank] = life
        self.changed.unpark_all()
        try:
            while rank == 0 and set(self.met) != {0, 1, 2}:
                await self.changed.park()
            with trio.move_on_after(LOAD_S):
                await self.ends[rank].wait()
            task_status.started()
            with self.registration.publish(SimpleNamespace(info=None)) if rank == 0 else nullcontext():
                await self.ends[rank].wait()
        except trio.Cancelled:
            with trio.move_on_after(self.ladder_s[rank], shield=True):
                await trio.sleep_forever()
            raise
        finally:
            del self.alive[rank], self.ports[rank]
            self.record(f"{rank} is gone")
        raise EngineDied(f"host {rank} was killed")

    def record(self, what: str) -> None:
        self.log.append((trio.current_time(), what))

    def kill(self, rank: int) -> None:
        if rank in self.ends:
            self.ends[rank].set()


@define(eq=False)
class Group:
    """Node a with rank 0 and its supervisor, nodes b and c, and the links from a to them."""

    nursery: trio.Nursery
    hosts: Hosts = Factory(Hosts)
    agreed: dict[str, str] = Factory(lambda: dict(AGREED))
    gateways: frozenset[str] = frozenset("a")
    another: Callable[[], int | None] = lambda: None  # the bootstrap port of the next life
    directory: Directory = Factory(lambda: Directory("a"))
    registration: Registration[Any] = field(init=False)
    here: LocalWorker = field(init=False)
    others: FollowerRanks = field(init=False)
    asked: dict[str, Any] = Factory(dict)  # by node
    nodes: dict[str, Directory] = Factory(lambda: {name: Directory(name) for name in "bc"})
    transports: dict[str, SimTransport] = Factory(dict)
    events: list[ChildEvent] = Factory(list)
    scope: trio.CancelScope = Factory(trio.CancelScope)  # around node a's tree
    over: trio.Event = Factory(trio.Event)
    failed: BaseException | None = None

    def __attrs_post_init__(self) -> None:
        self.registration = self.hosts.registration
        self.registration.on_change = self.directory.notify
        address, inbox = request_inbox(4)
        offer = Offer("big", "tiny", Leg.BOTH, 4, up=False)
        self.here = LocalWorker(
            node="a",
            idle_offer=offer,
            address=address,
            engine=self.registration,
            inbox=inbox,
            directory=self.directory,
        )
        self.directory.local["big"] = self.here
        self.others = FollowerRanks(
            "big", ("b", "c"), self.agreed, self.directory, LINKED_WITHIN_S, self.registration, self.gateways
        )
        for node, rank in (("b", 1), ("c", 2)):
            self.directory.configure(node, f"{node}:7400")
            asked: Address[RunRank, RankStarted, Done]
            asked, calls = mailbox(1)
            self.asked[node] = asked
            own = LocalRank(self.nodes[node], AGREED, PORTS)
            run = partial(run_follower_rank, calls, own, partial(self.hosts.keep, rank))
            self.nursery.start_soon(run, name=f"rank {rank}")

    def link(self, node: str, serves: dict[Any, Any] | None = None) -> None:
        """Join a and another node."""
        near, far = sim_pair()
        self.transports[node] = near
        serves = {("big", RunRank): self.asked[node]} if serves is None else serves
        asker, server = Link(near, Peer("a", serves_max=4)), Link(far, Peer(node, serves_max=4), serves)
        self.nursery.start_soon(self._carry, node, asker, True, name="link")
        self.nursery.start_soon(self._carry, node, server, False, name="link")

    async def _carry(self, node: str, link: Link, ours: bool) -> None:
        async with trio.open_nursery() as nursery:
            if ours:
                nursery.start_soon(self._note, node, link)
            try:
                await link.run()
            except PeerLost:
                nursery.cancel_scope.cancel()
        if ours:
            self.directory.unlinked(node, link)

    async def _note(self, node: str, link: Link) -> None:
        await link.wait_ready()
        self.directory.linked(node, link)

    def cut(self, node: str) -> None:
        self.transports[node].cut()

    async def supervise(self) -> None:
        """Run node a's tree, until its scope is cancelled."""
        engine = Child(name="engine", run=self._engine, start_within_s=100.0, stop_within_s=5.0)
        tree = Tree(name="a", children=(engine,), restarts_max=1000, backoff=Backoff(min_s=0.1, max_s=0.1, jitter=0.0))
        try:
            with self.scope:
                await supervise(tree, rng=random.Random(0), on_event=self.events.append)
        except StartFailed as error:
            self.failed = error
        self.over.set()

    async def _next_port(self) -> int | None:
        await trio.lowlevel.checkpoint()
        return self.another()

    async def _engine(self, *, task_status: trio.TaskStatus[None]) -> None:
        await self.others.run_all(partial(self.hosts.keep, 0), self._next_port, task_status=task_status)

    @property
    def ready(self) -> list[Any]:
        return [event.at for event in self.events if event.path == "a/engine" and event.kind is ChildEventKind.STARTED]

    @property
    def why(self) -> list[Any]:
        return [
            str(event.error)
            for event in self.events
            if event.path == "a/engine" and event.kind is ChildEventKind.FAILED
        ]

    async def until_ready(self, times: int = 1) -> None:
        with trio.fail_after(500):
            while len(self.ready) < times:  # noqa: ASYNC110  # tests alone wait so
                await trio.sleep(0.1)


@asynccontextmanager
async def running_group(*linked: str, **fields: Any) -> AsyncIterator[Group]:
    """Run node a of a group, with links to some of the others."""
    async with trio.open_nursery() as nursery:
        group = Group(nursery, **fields)
        for node in linked:
            group.link(node)
        nursery.start_soon(group.supervise, name="node a")
        yield group
        nursery.cancel_scope.cancel()


async def test_every_other_rank_is_asked_for_before_rank_0_starts_and_all_together_are_one_engine(
    autojump_clock: MockClock,
) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        assert [what for _, what in group.hosts.log] == ["1 starts", "2 starts", "0 starts"]
        assert group.ready == [LOAD_S]
        assert group.registration.blocked_by is None


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_whichever_rank_ends_all_end_and_all_start_again(rank: int, autojump_clock: MockClock) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        await trio.sleep_until(10)
        group.hosts.kill(rank)
        await group.until_ready(2)
        first, again = group.hosts.log[:3], [what for _, what in group.hosts.log[6:]]
        assert sorted(what for _, what in group.hosts.log[3:6]) == ["0 is gone", "1 is gone", "2 is gone"]
        assert again == [what for _, what in first]
        assert set(group.hosts.alive) == set(group.hosts.met) == {0, 1, 2}
        assert group.ready[1] == 10 + LADDER_S + LOAD_S
        where = (
            "host 0 was killed" if rank == 0 else f"rank {rank} of engine big on node {'abc'[rank]}: host {rank} was"
        )
        assert len(group.why) == 1
        assert where in group.why[0]


async def test_each_life_of_a_prefill_has_one_port_which_all_ranks_get(autojump_clock: MockClock) -> None:
    async with running_group("b", "c", another=partial(next, count(9000))) as group:
        for life in range(3):
            await group.until_ready(life + 1)
            assert group.hosts.ports == dict.fromkeys(range(3), 9000 + life)
            group.hosts.kill(life)


async def test_a_lost_link_ends_every_rank_and_the_engine_waits_for_another_link(autojump_clock: MockClock) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        await trio.sleep_until(10)
        group.cut("c")
        await trio.sleep_until(13)
        assert (group.hosts.alive, group.registration.blocked_by) == ({}, "there is no link to node c")
        await trio.sleep_until(30)
        assert group.hosts.alive == {}
        group.link("c")
        await group.until_ready(2)
        assert group.ready[1] == 30 + LOAD_S
        assert group.registration.blocked_by is None
        assert "rank 2 of engine big on node c: the link went down" in group.why[0]


async def test_a_rank_that_is_asked_for_again_waits_until_the_last_one_is_gone(autojump_clock: MockClock) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        group.hosts.ladder_s[1] = 7.0
        await trio.sleep_until(10)
        group.cut("b")
        await trio.sleep(0.5)
        group.link("b")
        await group.until_ready(2)
        starts = [at for at, what in group.hosts.log if what in {"1 starts", "2 starts", "0 starts"} and at > 5]
        assert min(starts) >= 17
        assert set(group.hosts.met) == {0, 1, 2}


async def test_an_engine_that_is_left_while_a_rank_of_it_waits_starts_nothing_there(autojump_clock: MockClock) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        group.hosts.ladder_s[1] = 20.0
        group.hosts.kill(2)
        await trio.sleep(LADDER_S + 1)
        assert len(group.why) == 1
        assert set(group.hosts.alive) == {1}  # rank 0's node has asked for it again, and waits
        group.scope.cancel()
        await group.over.wait()
        await trio.sleep(50)
        assert [what for _, what in group.hosts.log[3:]] == ["2 is gone", "0 is gone", "1 is gone"]


async def test_a_start_without_all_nodes_in_time_fails_with_the_missing_one(autojump_clock: MockClock) -> None:
    async with running_group("b") as group:
        await group.over.wait()
        assert trio.current_time() == LINKED_WITHIN_S
        assert str(group.failed) == "engine big spans 3 nodes: there is no link to node c"
        assert group.hosts.log == []


async def test_a_node_that_drains_is_not_asked_for_a_rank(autojump_clock: MockClock) -> None:
    async with running_group("b", "c") as group:
        group.directory.merge_state("c", NodeState(draining=True))
        await trio.sleep(5)
        assert group.registration.blocked_by == "node c drains"
        assert group.hosts.log == []
        group.directory.merge_state("c", NodeState())
        await group.until_ready()
        assert group.ready == [5 + LOAD_S]


async def test_when_a_node_drains_the_engine_is_chosen_no_more_finishes_what_it_has_and_ends(
    autojump_clock: MockClock,
) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        group.here.in_flight.requests = 1
        await trio.sleep_until(10)
        group.nodes["c"].drain()
        group.directory.merge_state("c", NodeState(draining=True))
        await trio.sleep_until(15)
        assert group.registration.current is None
        assert group.registration.blocked_by == "node c drains"
        assert set(group.hosts.alive) == {0, 1, 2}
        group.here.in_flight.requests = 0
        group.directory.notify()
        await group.nodes["c"].wait_idle()
        assert (trio.current_time(), group.nodes["c"].follower_ranks) == (15 + LADDER_S, 0)
        await trio.sleep(10)
        assert group.why == ["engine big gave way: node c drains"]
        assert group.hosts.alive == {}
        group.nodes["c"].draining = False
        group.directory.merge_state("c", NodeState())
        await group.until_ready(2)


async def test_the_requests_of_a_draining_gateway_are_served_before_the_engine_ends(autojump_clock: MockClock) -> None:
    async with running_group("b", "c", gateways=frozenset("c")) as group:
        await group.until_ready()
        group.here.in_flight.requests = 1
        group.directory.merge_state("c", NodeState(draining=True))
        await trio.sleep(5)
        assert group.registration.current is not None
        group.here.in_flight.requests = 0
        group.directory.notify()
        await trio.sleep(LADDER_S + 1)
        assert group.why == ["engine big gave way: node c drains"]


async def test_an_engine_whose_own_node_drains_is_left_to_that_nodes_plan(autojump_clock: MockClock) -> None:
    async with running_group("b", "c") as group:
        await group.until_ready()
        group.directory.drain()
        group.directory.merge_state("c", NodeState(draining=True))
        await trio.sleep(30)
        assert group.registration.current is not None
        assert group.why == []
        assert group.nodes["b"].follower_ranks == group.nodes["c"].follower_ranks == 1


@pytest.mark.parametrize(
    ("agreed", "reason"),
    [
        ({}, "the file of node b disagrees about slots, nodes"),
        ({**AGREED, "slots": ""}, "the file of node b disagrees about slots"),
        ({**AGREED, "x" * 5000: "1"}, "the file of node b disagrees about keys that are unknown here"),
    ],
)
def test_a_node_refuses_a_rank_that_differs_from_its_own_file(agreed: dict[str, str], reason: str) -> None:
    own = LocalRank(Directory("b"), AGREED)
    own.validate(RunRank(dict(AGREED)))
    with pytest.raises(BadRequest) as caught:
        own.validate(RunRank(agreed))
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("ports", "port", "wanted"),
    [
        (range(9000, 9032), None, "no bootstrap port"),
        *((range(9000, 9032), port, f"bootstrap port {port}") for port in (-1, 0, 22, 8999, 9032, 65_536, 2**64 - 1)),
        ((None,), 9000, "bootstrap port 9000"),
    ],
)
def test_a_rank_accepts_only_the_ports_of_its_own_file(
    ports: range | tuple[None], port: int | None, wanted: str
) -> None:
    own = LocalRank(Directory("b"), AGREED, ports)
    for allowed in ports:
        own.validate(RunRank(dict(AGREED), allowed))
    with pytest.raises(BadRequest) as caught:
        own.validate(RunRank(dict(AGREED), port))
    assert str(caught.value) == f"the file of node b does not allow it {wanted}"


async def test_a_rank_that_is_asked_for_twice_runs_once_at_a_time(autojump_clock: MockClock) -> None:
    async with running_group() as group:
        order = []

        async def ask(name: str, for_s: int) -> None:
            with trio.move_on_after(for_s):
                async with group.asked["b"].ask(RunRank(dict(AGREED)), 1) as answer:
                    await anext(answer)
                    order.append((trio.current_time(), name))
                    await answer.result()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "first", 5)
            await trio.sleep(1)
            nursery.start_soon(ask, "second", 10)
        assert order == [(0, "first"), (5 + LADDER_S, "second")]


# At every step ---------------------------------------------------------------------------


FAULTS: dict[str, Callable[[Group], None]] = {
    "cut": lambda group: group.cut("b"),
    "kill the first": lambda group: group.hosts.kill(0),
    "kill another": lambda group: group.hosts.kill(2),
}


async def one_fault(rng: random.Random, step: int, act: Callable[[Group], None]) -> bool:
    """Do `act` just before a step of a life from its start on; return whether the life had been over by then."""
    async with running_group("b", "c") as group:
        with counting(step, lambda: act(group)) as steps:
            await trio.sleep(20)
        await trio.sleep(1)
        if group.directory.nodes["b"].link is None:
            group.link("b")
        if group.failed is not None:  # whoever runs the node runs it again
            group.failed, group.scope = None, trio.CancelScope()
            group.nursery.start_soon(group.supervise, name="node a")
        await trio.sleep(20)
        assert group.failed is None
        assert set(group.hosts.alive) == set(group.hosts.met) == {0, 1, 2}
        group.scope.cancel()
        await trio.sleep(2 * LADDER_S)
        assert group.hosts.alive == {}
        links = [link for name in "bc" if (link := group.directory.nodes[name].link) is not None]
        assert len(links) == 2
        assert all(link.statistics().answers == link.statistics().streams_asked == 0 for link in links)
    return steps.taken < step


@pytest.mark.parametrize("act", FAULTS.values(), ids=FAULTS)
def test_at_every_step_all_ranks_come_back_or_none_is_left(act: Callable[[Group], None]) -> None:
    sweep(partial(one_fault, act=act))


def test_the_node_of_rank_0_can_be_stopped_at_every_step() -> None:
    async def stop(rng: random.Random, step: int) -> bool:
        async with running_group("b", "c") as group:
            with counting(step, group.scope.cancel) as steps:
                await trio.sleep(20)
            group.scope.cancel()
            await trio.sleep(2 * LADDER_S)
            assert group.over.is_set()
            assert group.hosts.alive == {}
        return steps.taken < step

    sweep(stop)
