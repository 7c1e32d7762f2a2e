"""Faults, and the errors that a server may report because of each."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio
from attrs import Factory, define, field

from protocol.errors import ActorError, EngineStuck, StartFailed, TooManyInternalErrors
from tests.rig.network import SimTransport
from tests.rig.small_system import SmallSystem
from tests.system.simulator.release_times import ReleaseDeadlines, kept_s
from tests.system.simulator.system import System

LOST = frozenset({"engine_lost", "actor_lost", "not_ready"})
LATE = frozenset({"deadline_exceeded", "preempted"})
AWAY_ERRORS = frozenset({"link_lost", "link_replaced", "not_ready", "draining"})
OF_HOSTS = frozenset({"crash", "cut the line", "half-open line"})
OF_NODES = ("cut a link", "half-open link", "stopped node", "node crash", "node drain")
TRUTHS: dict[str, frozenset[str]] = {
    "crash": LOST,
    "cut the line": LOST,
    "half-open line": LOST | LATE,
    "stuck": LOST | LATE,
    "start fails": LOST,
    "slow": LATE,
    "cut the front": frozenset({"link_lost"}),
    "half-open front": frozenset({"link_lost"}) | LATE,
    "jump": frozenset({"overloaded", "slow_client", "unanswered", "cut"}) | LOST | LATE,
    "bugs": frozenset({"internal"}),
    "too many bugs": frozenset({"actor_lost"}),  # the processor falls
    "drain": frozenset({"draining", "unanswered"}),
    # Of a cluster's nodes and of the links between them.
    "a leg dies": LOST,
    "cut a link": AWAY_ERRORS,
    "half-open link": AWAY_ERRORS | LATE,
    "stopped node": AWAY_ERRORS | LATE,
    "node crash": AWAY_ERRORS,
    "node drain": AWAY_ERRORS | {"actor_lost"},  # its tree may stop before its links say goodbye
    "front crash": frozenset({"unanswered", "cut"}),  # the gateway's node
    "stays away": AWAY_ERRORS | LOST | LATE,  # a node that has gone, until all is healed
    # Of what goes wrong alone.
    "black hole": frozenset({"internal"}),
    "failed hand-offs": frozenset({"hand_off_failed"}),
    # No faults of anybody, but what small limits come to.
    "impatient": LATE,
    "trickles": LOST | LATE,  # a Cancel that waits behind much else looks like an engine that keeps its slot
}
FAULTS = tuple(
    kind
    for kind in TRUTHS
    if kind
    not in {
        *OF_NODES,
        "front crash",
        "a leg dies",
        "stays away",
        "drain",
        "black hole",
        "failed hand-offs",
        "impatient",
        "trickles",
        "too many bugs",
    }
)
GOES_ON = frozenset(
    {"engine_lost", "actor_lost", "link_lost", "link_replaced", "draining"}
)  # not said where somebody else goes on
DEATHS = frozenset(kind for kind, codes in TRUTHS.items() if "engine_lost" in codes)  # of engines
LOSSES = frozenset(kind for kind, codes in TRUTHS.items() if codes & {"engine_lost", "link_lost"})
AWAY = frozenset({"half-open line", "stuck", "start fails", "jump", "slow", "trickles", *OF_NODES[1:]})
"""What may keep every worker, or every slot, away for longer than a request that has lost its worker waits."""
AT_ONCE = {
    "crash": 1,
    "a leg dies": 1,
    "cut the line": 1,
}  # how many engines die of it; of other things one may die again and again
MANY = 100
ALWAYS_BACK_S = 100.0  # after which every fault is over, and every slot was free again
BACK_WITHIN_S = 3.0  # a worker that has just fallen, or the link to it
FALLS: dict[str, tuple[type[ActorError], ...]] = {  # by what an actor may fall, beside a lost engine or a lost link
    "half-open line": (EngineStuck, StartFailed),
    "stuck": (EngineStuck,),
    "start fails": (StartFailed,),
    "jump": (EngineStuck, StartFailed),
    "bugs": (TooManyInternalErrors,),
    "trickles": (EngineStuck, StartFailed),
}


@define(eq=False)
class Faults:
    """Injects the faults that the seed draws, and records them."""

    system: System
    rng: random.Random
    note: Callable[..., None]
    happened: set[str] = Factory(set)
    losses: int = 0  # how often a worker, or the link to it, may have been lost
    away: int = 0  # how many workers may have been out of reach, each as often as it was
    deaths: int = 0  # how often it may have been an engine that died
    freeing: ReleaseDeadlines = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.freeing = ReleaseDeadlines(kept_s(self.system.deadlines))

    def may(self, code: str) -> bool:
        """Whether an error with this code is true by now."""
        crowded = code == "overloaded" and self.system.gate.was_full
        why = {kind for kind in self.happened if code in TRUTHS[kind]}
        lost = code in GOES_ON and not self.nobody_goes_on
        return crowded or bool(why - LOSSES if lost else why)

    @property
    def nobody_goes_on(self) -> bool:
        """Whether a request that has lost its worker may have found no other, or lost more than it may."""
        route = self.system.route
        away = "stays away" in self.happened or route.resume_s < BACK_WITHIN_S
        away = away or (route.resume_s < ALWAYS_BACK_S and bool(self.happened & AWAY))
        dead = self.deaths > route.crashes_max or (self.deaths > 0 and self.away >= self.routes)
        return away or dead or self.losses > route.resumes_max

    @property
    def routes(self) -> int:
        """How many workers, or pairs of them, there are to go to."""
        return self.system.workers

    async def one(self, kind: str) -> None:
        """Inject one fault at a drawn moment."""
        await trio.sleep(self.rng.random() * 3)
        await self.now(kind)

    async def now(self, kind: str) -> None:
        """Inject one fault now, and remove it later."""
        rng, system = self.rng, self.system
        world = self.place()
        number = rng.randrange(world.workers)
        if "front" in kind and not system.far:
            return
        if kind in OF_HOSTS and number not in world.hosts:  # of a node that has come back, and has yet to start it
            return
        self.happened.add(kind)
        self.losses += kind in LOSSES
        self.away += world.workers if "front" in kind else kind in LOSSES
        self.deaths += AT_ONCE.get(kind, MANY) if kind in DEATHS else 0
        self.note(kind, number)
        match kind:
            case "crash":
                world.hosts[number].crash()
            case "cut the line" | "cut the front":
                self._wire(kind, world, number).cut()
            case "half-open line" | "half-open front":
                wire, lasts_s = self._wire(kind, world, number), rng.random() * 6
                self.freeing.wrong(kind, lasts_s)
                wire.swallow()
                await trio.sleep(lasts_s)
                wire.cut()
            case "jump":
                clock = trio.lowlevel.current_clock()
                assert isinstance(clock, trio.testing.MockClock)
                jump_s = rng.choice((3.0, 20.0, 600.0))
                clock.jump(jump_s)
                self.freeing.jumped(jump_s)
            case "bugs":
                system.decode.bugs = rng.choice((1, 1, 8))
                if system.decode.bugs > 1:
                    self.happened.add("too many bugs")
            case _:
                await self._for_a_while(kind, world, number)

    def place(self) -> SmallSystem:
        """Return the node of the next fault."""
        return self.system

    async def _for_a_while(self, kind: str, world: SmallSystem, number: int) -> None:
        lasts_s = self.rng.random() * 4
        self.freeing.wrong(kind, lasts_s)
        match kind:
            case "start fails":
                world.starts_fail = True
                if number in world.hosts:  # else it has yet to start for the first time
                    world.hosts[number].crash()
                await trio.sleep(lasts_s)
                world.starts_fail = False
            case "stuck":
                world.costs.stuck = True
                await trio.sleep(lasts_s)
                world.costs.stuck = False
            case "slow":
                world.costs.slow = 50.0
                await trio.sleep(lasts_s)
                world.costs.slow = 1.0

    def _wire(self, kind: str, world: SmallSystem, number: int) -> SimTransport:
        return world.wires["front" if "front" in kind else f"line {number}"]
