"""One seed: what it draws, its faults, and the checks after all faults are gone."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from typing import Any

import trio
from attrs import define, evolve, field

from actors.engines.slots.deadlines import Deadlines
from actors.kit.groups import first_leaf
from actors.routing.route import FailoverLimits
from protocol.errors import EngineStuck
from supervisor.node.node import BYE_S, FAREWELL_S
from tests.rig.fake_engine import Costs
from tests.rig.scheduler import simulate, tasks
from tests.rig.small_system import LONG_S, living
from tests.system.simulator.broken_encoders import BrokenEncoder, KillingPicture
from tests.system.simulator.canaries import FrozenEngine
from tests.system.simulator.clients import DeafClient, HttpClient, LongClient
from tests.system.simulator.fault_plan import NO_PLAN, TIMES, FaultPlan, plan_node
from tests.system.simulator.faults import FALLS, FAULTS, PROMPT, Faults
from tests.system.simulator.lanes import DeafLaneClient, LaneClient
from tests.system.simulator.media import LIMITS as MEDIA_LIMITS
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.neighbours import CrashingNeighbour, NeverUp
from tests.system.simulator.operated_engines import OperatedEngines
from tests.system.simulator.operators import Operator
from tests.system.simulator.picture_faults import PICTURE_FALLS, PICTURE_FAULTS
from tests.system.simulator.pictured import draw_sight
from tests.system.simulator.post_clients import PostClient, TextClient
from tests.system.simulator.prefix_plan import aside, draw_canary, draw_prefixes
from tests.system.simulator.probes import health
from tests.system.simulator.programs import STREAMS, Operators, allow_all, draw_operators
from tests.system.simulator.single_fault import FailingEngine, SingleFault, StuckSlot, UnfairKeys, ejection
from tests.system.simulator.slow_readers import SlowReaders
from tests.system.simulator.system import LIMITS, System

DEADLINES = Deadlines(first_token_s=10.0, gap_s=2.0, total_s=30.0, release_s=1.0, leak_s=2.0)
KINDS = (*[HttpClient] * 5, *[LaneClient] * 6, TextClient, TextClient, PostClient, DeafClient, DeafLaneClient)
SINGLE_FAULTS: tuple[type[SingleFault], ...] = (
    FailingEngine,
    UnfairKeys,
    StuckSlot,
    NeverUp,
    CrashingNeighbour,
    SlowReaders,
    BrokenEncoder,
    KillingPicture,
    FrozenEngine,
    OperatedEngines,
)
PENDING_PREFILL = {0.02: 0, 0.05: 30, 0.1: 200}  # by the length of a step, since another draw would change every seed
TRICKLES_BYTES = 50  # of a connection's buffer
STOP_S = 15.0  # for every child that does not end by itself, one after the other
SINGLE_FAULT_SHARE = 0.2  # of the seeds, those with a single fault
ATTEMPTS_MAX = 10
CHAOS_S = 10_000.0  # of virtual time at most; clocks jump, too


@define(eq=False)
class Run:
    """One run of the whole system, from its seed to its end."""

    rng: random.Random
    only: type[SingleFault] | None = None  # its single fault, whatever the seed draws
    plan: FaultPlan = NO_PLAN
    system: System = field(init=False)
    faults: Faults = field(init=False)
    drains: bool = field(init=False)
    clients: int = field(init=False)
    times: dict[str, int] = field(init=False)  # of each fault, within three seconds
    aside: random.Random = field(init=False)  # for what was added later: another draw would change every seed
    picture_times: dict[str, int] = field(init=False)  # the same of faults that concern pictures alone
    operators: Operators | None = field(init=False)
    single_fault: type[SingleFault] | None = field(init=False, default=None)  # instead of them
    trace: list[tuple[object, ...]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        rng, self.aside = self.rng, aside(self.rng)
        self.operators = draw_operators(self.aside, planned=self.plan.operated)
        self.clients = rng.randint(2, 7)
        self.drains = rng.random() < 0.15
        # Most seeds have few faults, so that each is seen alone.
        self.times = {kind: rng.choice((0, 0, 0, 0, 0, 1, 2)) for kind in FAULTS} if rng.random() < 0.8 else {}
        self.picture_times = {kind: rng.choice((0, 0, 0, 0, 0, 1, 2)) for kind in PICTURE_FAULTS}
        share = SINGLE_FAULT_SHARE if self.plan is NO_PLAN else 0.0
        self.single_fault = rng.choice(SINGLE_FAULTS) if rng.random() < share else None
        self.single_fault = self.only or self.single_fault
        self._follow_plan()
        if self.single_fault is not None:
            self.clients, self.drains, self.times = 0, self.single_fault.drains, {}
            self.picture_times, self.operators = {}, None
        self.system = self._system()
        self.faults = Faults(self.system, rng, self.note)
        self._small_limits()
        self._expect_falls()
        self._excuse_lags()

    def _follow_plan(self) -> None:
        """Let what is planned happen, beside what is drawn."""
        if self.plan is NO_PLAN:
            return
        self.clients, self.drains = max(self.clients, self.plan.clients), "drain" in self.plan.faults
        self.times |= dict.fromkeys(self.plan.injected, TIMES)
        self.picture_times |= dict.fromkeys(self.plan.picture_faults, TIMES)

    def _excuse_lags(self) -> None:
        """Let routers lag behind what workers tell where a fault delays or spoils it."""
        if (plan := self.system.prefixes) is not None:
            plan.caches.late = lambda: bool(plan.spoiling.spoiled or self.faults.happened - PROMPT)

    def _expect_falls(self) -> None:
        for kind in (*self.faults.happened, *(kind for kind, times in self.times.items() if times)):
            self.system.faults += FALLS.get(kind, ())
        for kind, times in self.picture_times.items():
            self.system.faults += PICTURE_FALLS.get(kind, ()) if times else ()
        if self.single_fault is not None:
            self.system.faults += self.single_fault.falls
        if self.system.canary is not None and self.times.get("slow"):
            self.system.faults += (EngineStuck,)  # a step of many tokens takes longer than a canary may

    def _system(self) -> System:
        rng = self.rng
        tls = rng.random() < 0.3 or self.plan.tls
        costs = Costs(
            slots=rng.randint(1, 3),
            step_s=rng.choice((0.02, 0.05, 0.1)),
            prefill_s=rng.choice((0.0, 0.002)),
            release_s=rng.choice((0.0, 0.01, 0.3)),
            vocabulary_size=VOCABULARY,
        )
        costs.pending_prefill_max = PENDING_PREFILL[costs.step_s]
        network = {
            "delay_s": rng.choice((0.0, 0.002, 0.05)),
            "piece_max": rng.choice((3, 40, 1000, 1000, 1000, 1000)),
            "room": rng.choice(
                (TRICKLES_BYTES, 4096, 4096, 65536, 65536, 65536) if self.single_fault is None else (65536,)
            ),
        }
        if "trickles" in self.plan.faults:
            network["room"] = TRICKLES_BYTES
        drawn: dict[str, Any] = {
            "rng": rng,
            "workers": rng.choice((1, 2, 2)),
            "costs": costs,
            "inbox_size": rng.randint(0, 3),
            "streams": rng.choice((2, 6, 12)),
            "far": rng.random() < 0.3 or self.plan.far,
            "deadlines": DEADLINES,
            "network": network,
            "limits": evolve(
                LIMITS,
                # More than the output of one engine step; over TLS none of it is sent before its task runs.
                backlog_bytes_max=rng.choice((24_000 if tls else 6000, 100_000)),
                websocket_running_max=rng.choice((1, 2, 16)),
                websocket_queue_max=rng.choice((1, 16)),
            ),
            "requests_max": rng.choice((3, 8, 16)),
            "waiting_max": rng.choice((1, 16)),
            "admit_s": rng.choice((0.5, 100.0)),
            "first_token_s": rng.choice((200.0, 200.0, 3.0)),
            "total_s": rng.choice((300.0, 300.0, 1.5)),
            "drain_s": rng.choice((1.0, 10.0, 60.0)),
            "route": FailoverLimits(
                resumes_max=rng.choice((0, 1, 3) if self.plan.resumes else (0,)),
                crashes_max=rng.choice((0, 1, 1)),
                resume_s=rng.choice((0.3, 10.0, 10.0)),
                ejection=ejection(rng),
            ),
            "tls": tls,
        }
        sight = draw_sight(rng, needed=bool(self.plan.picture_faults), blind=self.plan.blind)
        sight.open(costs)
        drawn |= sight.fields | {"encoders": sight.encoders}
        tight = self.single_fault is None
        drawn["prefixes"] = draw_prefixes(self.aside, network["delay_s"], tight=tight, planned=self.plan.spoils)
        drawn["canary"] = draw_canary(self.aside) if self.single_fault is None else None
        if self.operators is not None:
            drawn |= {"operated": True, "streams": STREAMS}
            allow_all(costs)
        return System(**drawn | ({} if self.single_fault is None else self.single_fault.shape(rng)))

    def _small_limits(self) -> None:
        happened = self.faults.happened
        if self.trickles:
            happened.add("trickles")
            self.faults.releases.always("trickles")
        if self.system.media_limits.waiting_max < MEDIA_LIMITS.waiting_max:
            self.faults.pictures.happened.add("crowded")
        if min(self.system.first_token_s, self.system.total_s) < LONG_S:
            happened.add("impatient")

    @property
    def trickles(self) -> bool:
        """Whether a `Cancel` may wait long behind earlier frames."""
        room_bytes: float = self.system.network["room"]
        return room_bytes == TRICKLES_BYTES

    @property
    def port(self) -> System:
        """The system as clients reach it."""
        return self.system

    def note(self, *what: object) -> None:
        self.trace.append((round(trio.current_time(), 9), *what))

    # ---------------------------------------------------------------------------------------

    async def chaos(self) -> None:
        """Run clients and faults; every answer is judged as it comes."""
        async with trio.open_nursery() as nursery:
            for number in range(self.clients):
                client = self.rng.choice(KINDS)(self.port, self.rng, f"c{number}", self.faults, self.note)
                nursery.start_soon(client.live)
            self._use_caches(nursery)
            for operator in self._operators():
                nursery.start_soon(operator.live)
            if self.single_fault is not None:
                nursery.start_soon(self.single_fault(self.system, self.rng, self.faults, self.note).live)
            for kind, times in self.times.items():
                for _ in range(times):
                    nursery.start_soon(self._inject, kind, self.faults.one)
            for kind, times in self.picture_times.items():
                for _ in range(times if self.system.sighted else 0):
                    nursery.start_soon(self._inject, kind, self.faults.pictures.one)
            if self.drains:
                nursery.start_soon(self._drain)

    async def _inject(self, kind: str, inject: Callable[[str], Awaitable[None]]) -> None:
        """Inject a fault at a random moment; a planned one again if nothing was there that it could befall."""
        await inject(kind)
        for _ in range(ATTEMPTS_MAX):
            if kind not in (*self.plan.faults, *self.plan.picture_faults) or any(
                kind == what for _, what, *_ in self.trace
            ):
                break
            await inject(kind)

    def _operators(self) -> Iterator[Operator]:
        if (drawn := self.operators) is None:
            return
        for number in range(drawn.number):
            chance = drawn.chance(number)
            own = self.port, chance, f"o{number}", self.faults, self.note, drawn.programs(chance)
            yield Operator(*own)

    def _use_caches(self, nursery: trio.Nursery) -> None:
        """Fill prefix caches and flush them, in seeds that have some."""
        if (plan := self.system.prefixes) is None:
            return
        for number in range(plan.crowd):
            name = f"l{number}"
            nursery.start_soon(LongClient(self.port, plan.chance(name), name, self.faults, self.note).live)
        for after_s in plan.flushes:
            nursery.start_soon(self.system.flush, after_s)

    async def _drain(self) -> None:
        await trio.sleep(1 + self.rng.random() * 3)
        self.faults.happened.add("drain")
        self.note("drain")
        if self.rng.random() < 0.3:
            self.system.node.runtime.grace.shorten()  # the second signal
        begun_at = trio.current_time()
        async with trio.open_nursery() as self.system.node.nursery:
            self.system.drain()
            await trio.sleep(0.1)
            await trio.testing.wait_all_tasks_blocked()  # the clock may have jumped
            assert not self.system.gateway.gate.waiting, "waiting requests were not refused"
        drained_at = trio.current_time()
        await self.system.over.wait()
        if not self.times.get("jump"):
            assert drained_at <= begun_at + self.system.drain_s + FAREWELL_S + BYE_S
            assert trio.current_time() <= drained_at + STOP_S

    async def all(self) -> None:
        """Check safety while faults are injected, then remove them and check liveness."""
        self.note("tls" if self.system.tls else "plain")
        async with living(self.system) as system:
            if system.prefixes is not None:  # which are told of first
                await trio.sleep(LONG_S)
                system.tasks = tasks()
            with trio.fail_after(CHAOS_S):
                await self.chaos()
            system.end_canaries()
            if self.drains:
                with trio.fail_after(LONG_S):
                    await system.over.wait()
                system.check_nothing_is_left()
            else:
                await trio.sleep(LONG_S)
                await system.put_all_right()
                system.heal()
                await system.wait_trusted()
                await health(system)
                await trio.sleep(LONG_S)
                await system.check_at_rest()
                await system.check_serves()
            self.note("at rest", [list(host.scheduler.log) for host in system.hosts.values()])
            self._note_prefixes()
        self.trace.extend((event.at, event.path, event.kind.name) for event in system.child_events)

    def _note_prefixes(self) -> None:
        if (plan := self.system.prefixes) is not None:
            caches, spoiling = plan.caches, plan.spoiling
            self.note("prefixes", caches.expected, caches.reused, caches.evicted, spoiling.original, spoiling.spoiled)

    async def traced(self) -> str:
        """Run the seed and return its trace; an exception gets the trace as a note.

        Raises what a check inside an actor has found, rather than how clients saw that actor fall.
        """
        try:
            await self.all()
        except BaseException as error:
            error.add_note("\n".join(map(repr, self.trace)))
            if (found := self._found_in_actor()) is not None:
                raise found from error
            raise
        return "\n".join(map(repr, self.trace))

    def _found_in_actor(self) -> AssertionError | None:
        """Return the first error of a check that runs inside an actor, if one has failed."""
        events = (event for system in self.checked_systems() for event in system.child_events)
        errors = (first_leaf(event.error) for event in events if event.error is not None)
        return next((error for error in errors if isinstance(error, AssertionError)), None)

    def checked_systems(self) -> Sequence[System]:
        """Return the systems whose routers are checked as they choose."""
        return (self.system,)


def traced(scenario: Callable[[random.Random], Awaitable[str]], seed: int) -> str:
    """Run one seed without logs, since actors fail in it on purpose; return its trace."""
    logging.disable(logging.CRITICAL)
    try:
        trace = simulate(scenario, seed)
    finally:
        logging.disable(logging.NOTSET)
    assert isinstance(trace, str)
    return trace


@cache
def run_seed(seed: int, *, planned: bool = False) -> str:
    """Run one seed, with the faults that are dealt to it if they are planned; return its trace."""

    async def whole_system(rng: random.Random) -> str:
        return await Run(rng, plan=plan_node(seed) if planned else NO_PLAN).traced()

    return traced(whole_system, seed)
