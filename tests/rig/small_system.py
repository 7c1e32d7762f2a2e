"""A small system in virtual time: a real supervision tree, decode, adapter and links; simulated engines and network."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

import trio
from attrs import Factory, define, field

from actors.canary import CanaryLimits, CanaryObserver, canary
from actors.decode import decode
from actors.engines.hosted_engine import HostedEngine
from actors.engines.port import Engine
from actors.engines.simulated.hand_off import HAND_OFF
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.shared_prefixes import SharedPrefixes
from actors.engines.slots.slots import Slots
from actors.kit.groups import first_leaf
from protocol.engine_state import EngineState
from protocol.errors import EngineDied, EngineLost, PeerLost, RequestError, StartFailed
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, GetInfo
from protocol.messages.generation import Finished, FinishReason, Generate, Tokens, Usage
from protocol.messages.kind import Message
from protocol.messages.memory import ResumeMemory
from protocol.messages.weights import EndWeightsUpdate
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.operations import engine_services
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.supervision.events import ChildEvent
from supervisor.supervision.registration import Registration
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import Backoff, Child, Strategy, Tree
from tests.rig.calls import AnyAddress, AnyPriorityInbox, priority_inbox
from tests.rig.engine_lives import carrying_out, check_in_service
from tests.rig.fake_engine import Costs, generate, whole
from tests.rig.fake_host import FakeHost
from tests.system.simulator import SimTransport, sim_pair, tasks

DEADLINES = Deadlines(first_token_s=4.0, gap_s=2.0, total_s=12.0, release_s=1.0, leak_s=2.0)
HANGS = "hangs"
CANARY = "canary"  # the beginning of the ids of canaries
NEVER_S = 1e6
ROOMS_FROM = 2**40  # of canaries, which share none with a request
PAUSE_S = 0.1  # between two looks at an operation that runs
LONG_S = 30.0  # longer than every deadline of the system together


@define
class LiveCanary:
    """The limits of canaries, which may change while engines run."""

    after_s: float
    within_s: float

    @property
    def answered_within_s(self) -> float:
        """The longest time for a whole answer, as of `CanaryLimits`."""
        return self.within_s

    def heal(self) -> None:
        """Let each engine have one more canary at most."""
        self.after_s = NEVER_S


@define(eq=False)
class SmallSystem:
    """The parts of the system that a test observes or breaks."""

    rng: random.Random | None = None
    workers: int = 1
    costs: Costs = field(factory=lambda: Costs(slots=2, step_s=0.05, release_s=0.05))
    inbox_size: int = 2
    streams: int = 8
    network: dict[str, Any] = field(factory=dict)
    faults: tuple[type[Exception], ...] = (EngineDied, PeerLost)  # what may end an actor here
    deadlines: Deadlines = DEADLINES
    host_of: Callable[[SimTransport, Costs], FakeHost] = FakeHost
    starts_fail: bool = False
    canary: LiveCanary | None = None  # of each engine, if there are any
    never_up: dict[int, str] = Factory(dict)  # by number, how an engine does not start: it fails, or hangs
    address: AnyAddress = field(init=False)
    inbox: AnyPriorityInbox = field(init=False)
    front: Registration[Link] = field(factory=Registration)
    engines: list[Registration[Engine]] = Factory(list)
    slots: list[Registration[Slots]] = field(init=False)
    lives: list[Registration[EngineLife]] = field(init=False)
    hosts: dict[int, Any] = Factory(dict)  # a `FakeHost` or a `LocalEngine`
    lines: dict[int, Link] = Factory(dict)
    transports: dict[str, SimTransport] = Factory(dict)
    server: Link | None = None  # the front's other end
    child_events: list[ChildEvent] = Factory(list)
    tasks: list[str] = Factory(list)
    scope: trio.CancelScope = field(factory=trio.CancelScope)  # around the tree
    over: trio.Event = field(factory=trio.Event)
    _canaries: Iterator[int] = field(factory=partial(count, ROOMS_FROM))
    _versions: Iterator[int] = field(factory=count)

    def __attrs_post_init__(self) -> None:
        self.address, self.inbox = priority_inbox(max(1, self.inbox_size), lambda _: 0)
        self.engines = [Registration(partial(self._engine_changed, number)) for number in range(self.workers)]
        self.slots = [Registration() for _ in range(self.workers)]
        self.lives = [Registration() for _ in range(self.workers)]

    def _engine_changed(self, number: int) -> None:
        """Do what `supervisor.engines.children` does when an engine comes, goes, or changes its service."""
        self.inbox.recheck()
        self.cancel_probe(number)

    def cancel_probe(self, number: int) -> None:
        """Cancel the probe of an engine that is out of service."""
        slots = self.slots[number].live
        if slots is not None and not self.engines[number].in_service:
            slots.cancel_probe("the engine is out of service")

    @property
    def tree(self) -> Tree:
        workers = tuple(
            Tree(  # as `supervisor.engines.children` makes it, but for a shorter wait
                name=f"worker {number}",
                strategy=Strategy.ONE_FOR_ALL,
                children=(
                    Child(name="engine", run=self._engine, args=(number,)),
                    Child(name="decode", run=self._decode, args=(number,)),
                    *self._canary_children(number),
                ),
                restarts_max=None,
                backoff=Backoff(min_s=0.1, max_s=1.0, reset_after_s=5.0, crashes=True),
                needs=(),
            )
            for number in range(self.workers)
        )
        backoff = Backoff(min_s=0.1, max_s=1.0)
        return Tree(
            name="node", children=self.children(*workers), restarts_max=100, restarts_window_s=60.0, backoff=backoff
        )

    def children(self, *workers: Tree) -> tuple[Child | Tree, ...]:
        """Return the children of the node."""
        return (*workers, Child(name="front", run=self._front))

    def costs_of(self, number: int) -> Costs:
        """Return the costs of one engine: those of all, as a rule."""
        return self.costs

    def pair(self, name: str) -> tuple[SimTransport, SimTransport]:
        near, far = sim_pair(self.rng, **self.network)
        self.transports[name] = near
        return near, far

    # The children ----------------------------------------------------------------------

    async def _front(self, *, task_status: trio.TaskStatus[None]) -> None:
        near, far = self.pair("front")
        near_link = Link(near, Peer("clients", serves_max=0))
        services = {key: each for number in range(self.workers) for key, each in self.services_of(number).items()}
        serves = {("", Generate): self.address, **services}
        self.server = Link(far, Peer("node", serves_max=self.streams), serves)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.server.run, name="front.server")
                nursery.start_soon(near_link.run, name="front.asker")
                await near_link.wait_ready()
                with self.front.publish(near_link):
                    task_status.started()
                    await trio.sleep_forever()
        except* PeerLost:
            raise PeerLost("the front was cut") from None

    async def _engine(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        if self.never_up.get(number) == HANGS:
            await trio.sleep_forever()
        if self.starts_fail or number in self.never_up:
            raise StartFailed("it does not start")
        near, far = self.pair(f"line {number}")
        host = self.hosts[number] = self.host_of(far, self.costs_of(number))
        link = self.lines[number] = Link(near, Peer("node", serves_max=0), lost_error=EngineLost)
        async with trio.open_nursery() as nursery:

            async def carry() -> None:
                with suppress(PeerLost):
                    await link.run()
                nursery.cancel_scope.cancel(reason="the line is lost")

            nursery.start_soon(host.run, name="host")
            nursery.start_soon(carry, name="line")
            with suppress(EngineLost):
                await link.wait_ready()
                async with link.ask(GetInfo(), 0) as answer:
                    info = await answer.result()
                assert isinstance(info, EngineInfo)
                with self.engines[number].publish(HostedEngine(link, info)):
                    task_status.started()
                    await trio.sleep_forever()
        raise EngineDied("it crashed")

    def end_canaries(self) -> None:
        """Let every engine of the run have one more canary at most, so that it can be seen at rest."""
        if self.canary is not None:
            self.canary.heal()

    def _canary_children(self, number: int) -> tuple[Child, ...]:
        return () if self.canary is None else (Child(name="canary", run=self._canary, args=(number,)),)

    async def _canary(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        slots, limits = await self.slots[number].wait(), cast("CanaryLimits", self.canary)
        new_id, new_number = (lambda: f"{CANARY}-{next(self._canaries)}"), partial(next, self._canaries)
        await canary(slots, limits, new_id, new_number, HAND_OFF, CanaryObserver(), task_status=task_status)

    async def _decode(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        engine = await self.engines[number].wait()
        slots = self.new_slots(number, engine, self.costs)
        own = engine, self.engines[number], slots, self.lives[number]
        with self.slots[number].publish(slots):
            async with carrying_out(*own):
                await decode(self.inbox, [slots], task_status=task_status)

    def new_slots(self, number: int, engine: Engine, costs: Costs) -> Slots:
        """Return the slots of a life of an engine."""
        prefixes, in_service = shared_prefixes(costs), lambda: self.engines[number].in_service
        return Slots(engine, costs.slots, self.deadlines, in_service=in_service, prefixes=prefixes)

    # Operations -------------------------------------------------------------------------

    def services_of(self, number: int) -> Services:
        """Return the operations of an engine as services, by its number."""
        return engine_services(str(number), self.engines[number], self.lives[number])

    async def operate(self, number: int, request: Message) -> Message:
        """Have an engine carry out an operation; raises its error."""
        async with self.services_of(number)[str(number), type(request)].ask(request, 0) as answer:
            result = await answer.result()
        assert result is not None
        return result

    async def put_right(self) -> None:
        """Return released memory and end sessions of updates, until every engine that is up is in its first state."""
        for number, published in enumerate(self.lives):
            while (life := published.live) is not None and life.state != EngineState():
                if not life.state.operation:
                    end = EndWeightsUpdate(f"right {next(self._versions)}")
                    with suppress(RequestError):
                        await self.operate(number, end if life.state.updating else ResumeMemory())
                await trio.sleep(PAUSE_S)

    # Requests and checks ----------------------------------------------------------------

    @property
    def line_watches(self) -> int:
        """The streams that are always open to each engine: of those who watch it."""
        return 0

    @property
    def front_watches(self) -> int:
        """The streams that are always open on the front."""
        return 0

    async def ask(self, request: Generate, pause: Callable[[], Awaitable[object]] | None = None) -> list[int]:
        """Send one request over the front link; check each token and the end."""
        expected, finished = whole(request, self.costs.vocabulary_size)
        link = await self.front.wait()
        ids: list[int] = []
        async with link.ask(request, request.sampling.tokens_max) as replies:
            async for reply in replies:
                if isinstance(reply, Tokens):
                    ids += reply.ids
                    assert ids == expected[: len(ids)], "a wrong token"
                if pause is not None:
                    await pause()
            result = await replies.result()
        assert (ids, result) == (expected, finished), "a truncated answer looks complete"
        assert isinstance(result, Finished)
        assert result.usage == Usage(len(request.tokens), len(ids))
        assert (result.reason is FinishReason.STOP) == (ids[-1] in request.sampling.stop_token_ids)
        return ids

    @property
    def at_once_max(self) -> int:
        """The number of concurrent requests that can reach the engines."""
        return self.streams

    async def probe_all(self, count: int) -> None:
        """Check so many concurrent answers of a healthy system."""
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(self.ask, generate(f"probe {number}", tokens_max=20))

    async def check_at_rest(self) -> None:
        """Check that every slot, stream, scope and task is released."""
        if self.server is not None:
            assert self.front.current is not None, "the front is down"
            check_streams(self.front.current, asked=self.front_watches)
            check_streams(self.server, served=self.front_watches)
        for line in self.lines.values():
            check_streams(line, asked=self.line_watches)
        self.check_engines()
        assert self.inbox.waiting == (0, 0)
        left = Counter(tasks()), Counter(self.tasks)
        assert left[0] == left[1], f"tasks were left behind {left[0] - left[1]}, or are missing {left[1] - left[0]}"

    def check_engines(self) -> None:
        """Check that every engine is up and holds nothing."""
        for number, host in self.hosts.items():
            assert not host.scheduler.running, "an engine slot is held"
            assert not host.scheduler.waiting
            host.engine.check_whole()
            assert not host.streams
            assert len(host.peer.served) == self.line_watches
            engine = self.engines[number].current
            assert isinstance(engine, HostedEngine), "an engine is down"
            assert not engine.unreleased, "the adapter remembers a request"
        self.check_lives()

    def check_lives(self) -> None:
        """Check that every engine is in service, and that no operation is left."""
        for engine, life in zip(self.engines, self.lives, strict=True):
            check_in_service(engine, life)

    async def check_serves(self) -> None:
        """Check that all slots can be taken at once."""
        slots = min(self.workers * self.costs.slots, self.at_once_max)
        # Slow enough that on the worst network all of them begin before one ends.
        self.costs.step_s = 1.0 if self.network.get("room") == 50 else 0.2
        at_once: list[int] = []

        async def look() -> None:
            for _ in range(40):
                await trio.sleep(self.costs.step_s)
                at_once.append(sum(len(host.scheduler.running) for host in self.hosts.values()))

        with trio.fail_after(3 * LONG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                nursery.start_soon(self.probe_all, slots + 2)  # two more wait, and must be answered, too
        assert max(at_once) == slots, "a slot is lost"
        await trio.sleep(LONG_S)
        await self.check_at_rest()

    def check_how_it_went(self) -> None:
        """Check that no actor ended by anything but the faults that were planned."""
        for event in self.child_events:
            error = event.error
            if error is not None and not isinstance(first_leaf(error), self.faults):
                raise AssertionError(f"{event}") from error


def shared_prefixes(costs: Costs) -> SharedPrefixes | None:
    """Return what lets prompts wait for each other at an engine whose prefix cache is known to routers."""
    return SharedPrefixes(costs.page_size) if costs.prefix_cache and costs.leg is Leg.BOTH else None


def check_streams(link: Link, asked: int = 0, served: int = 0) -> None:
    """Check that a link is up and has only the streams that are always open."""
    assert link.statistics().answers == asked, "an asked stream is open, or one is missing"
    assert link.statistics().calls == served, "a served stream is open, or one is missing"
    assert (len(link.peer.asked), len(link.peer.served)) == (asked, served), "a stream is open, or one is missing"
    assert not link.lost


S = TypeVar("S", bound=SmallSystem)


@asynccontextmanager
async def living(system: S) -> AsyncIterator[S]:
    """Run the system for the body, and shut it down."""
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            with system.scope:
                await supervise(
                    system.tree,
                    rng=system.rng or random.Random(0),
                    on_event=system.child_events.append,
                    task_status=task_status,
                )
            system.over.set()

        await nursery.start(run)
        await trio.testing.wait_all_tasks_blocked()
        system.tasks = tasks()
        yield system
        system.check_how_it_went()
        system.scope.cancel()
