"""Faults, and the errors that each of them allows a server to report."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio
from attrs import Factory, define, field

from protocol.errors import ActorError, EngineStuck, StartFailed, TooManyInternalErrors
from tests.rig.network import SimTransport
from tests.rig.small_system import SmallSystem
from tests.system.simulator.judge import PICTURES
from tests.system.simulator.picture_faults import PictureFaults
from tests.system.simulator.release_times import ReleaseDeadlines, kept_s
from tests.system.simulator.system import System

LOST = frozenset({"engine_lost", "actor_lost", "not_ready"})
LATE = frozenset({"deadline_exceeded", "preempted"})
AWAY_ERRORS = frozenset({"link_lost", "link_replaced", "not_ready", "draining"})
OF_HOSTS = frozenset({"crash", "cut the line", "half-open line"})
OF_NODES = ("cut a link", "half-open link", "stopped node", "node crash", "node drain")
ALLOWED_ERRORS: dict[str, frozenset[str]] = {
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
    # Faults of a cluster's nodes and of the links between them.
    "a leg dies": LOST,
    "cut a link": AWAY_ERRORS,
    "half-open link": AWAY_ERRORS | LATE,
    "stopped node": AWAY_ERRORS | LATE,
    "node crash": AWAY_ERRORS,
    "node drain": AWAY_ERRORS | {"actor_lost"},  # its tree may stop before its links send `Bye`
    "front crash": frozenset({"unanswered", "cut"}),  # the gateway's node
    "stays away": AWAY_ERRORS | LOST | LATE,  # a node that has gone, until the faults are healed
    # Single faults.
    "black hole": frozenset({"internal"}),
    "failed hand-offs": frozenset({"hand_off_failed"}),
    # No fault, but engines that are out of service for a while.
    "operation": frozenset({"not_ready"}),
    # No faults, but the results of small limits.
    "impatient": LATE,
    "trickles": LOST | LATE,  # a `Cancel` that waits long looks like an engine that keeps its slot
}
FAULTS = tuple(
    kind
    for kind in ALLOWED_ERRORS
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
        "operation",
    }
)
CLUSTER_FAULTS = (
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
RESUMABLE = frozenset(
    {"engine_lost", "actor_lost", "link_lost", "link_replaced", "draining"}
)  # not reported while another worker can continue
DEATHS = frozenset(kind for kind, codes in ALLOWED_ERRORS.items() if "engine_lost" in codes)  # of engines
LOSSES = frozenset(kind for kind, codes in ALLOWED_ERRORS.items() if codes & {"engine_lost", "link_lost"})
AWAY = frozenset({"half-open line", "stuck", "start fails", "jump", "slow", "trickles", "operation", *OF_NODES[1:]})
"""Faults that may make every worker or slot unavailable for longer than a request that lost its worker waits."""
PROMPT = frozenset(
    {
        "crash",
        "cut the line",
        "a leg dies",
        "stuck",
        "start fails",
        "slow",
        "bugs",
        "too many bugs",
        "drain",
        "impatient",
        "operation",
    }
)
"""Faults that delay nothing of what workers tell of their prefix caches."""
AT_ONCE = {
    "crash": 1,
    "a leg dies": 1,
    "cut the line": 1,
}  # engines that die of it; of other faults one may die again and again
MANY = 100
BUGS_MAX = 8  # more than an actor survives
ALWAYS_BACK_S = 100.0  # after which every fault is over, and every slot was free again
BACK_WITHIN_S = 3.0  # a worker that has just failed, or the link to it
FALLS: dict[str, tuple[type[ActorError], ...]] = {  # errors of actors, beside a lost engine or a lost link
    "half-open line": (EngineStuck, StartFailed),
    "stuck": (EngineStuck,),
    "start fails": (StartFailed,),
    "jump": (EngineStuck, StartFailed),
    "bugs": (TooManyInternalErrors,),
    "too many bugs": (TooManyInternalErrors,),
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
    releases: ReleaseDeadlines = field(init=False)
    pictures: PictureFaults = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.releases = ReleaseDeadlines(kept_s(self.system.deadlines))
        self.pictures = self._picture_faults()

    def _picture_faults(self) -> PictureFaults:
        return PictureFaults(self.system, self.rng, self.note, ALLOWED_ERRORS)

    def may(self, code: str) -> bool:
        """Whether an error with this code is allowed by the faults so far."""
        if code.startswith(PICTURES):
            return self.pictures.may(code.removeprefix(PICTURES))
        crowded = code == "overloaded" and self.system.gate.was_full
        causes = {kind for kind in self.happened if code in ALLOWED_ERRORS[kind]}
        resumed = code in RESUMABLE and not self.resume_may_fail
        return crowded or bool(causes - LOSSES if resumed else causes)

    @property
    def resume_may_fail(self) -> bool:
        """Whether a request that lost its worker may have found no other, or exceeded its limits."""
        route = self.system.route
        away = "stays away" in self.happened or route.resume_s < BACK_WITHIN_S
        away = away or (route.resume_s < ALWAYS_BACK_S and bool(self.happened & AWAY))
        dead = self.deaths > route.crashes_max or (self.deaths > 0 and self.away >= self.routes)
        return away or dead or self.losses > route.resumes_max

    @property
    def routes(self) -> int:
        """The number of workers, or pairs of them."""
        return self.system.workers

    async def one(self, kind: str) -> None:
        """Inject one fault at a random moment."""
        await trio.sleep(self.rng.random() * 3)
        await self.now(kind)

    async def now(self, kind: str) -> None:
        """Inject one fault now, and remove it later."""
        rng, system = self.rng, self.system
        node = self.choose_node()
        number = rng.randrange(node.workers)
        if "front" in kind and not system.far:
            return
        if kind in OF_HOSTS and number not in node.hosts:  # a node that has come back has not started it yet
            return
        self.happened.add(kind)
        self.losses += kind in LOSSES
        self.away += node.workers if "front" in kind else kind in LOSSES
        self.deaths += AT_ONCE.get(kind, MANY) if kind in DEATHS else 0
        self.note(kind, number)
        match kind:
            case "crash":
                node.hosts[number].crash()
            case "cut the line" | "cut the front":
                self._wire(kind, node, number).cut()
            case "half-open line" | "half-open front":
                wire, lasts_s = self._wire(kind, node, number), rng.random() * 6
                self.releases.wrong(kind, lasts_s)
                wire.swallow()
                await trio.sleep(lasts_s)
                wire.cut()
            case "jump":
                clock = trio.lowlevel.current_clock()
                assert isinstance(clock, trio.testing.MockClock)
                jump_s = rng.choice((3.0, 20.0, 600.0))
                clock.jump(jump_s)
                self.releases.jumped(jump_s)
            case "bugs":
                self._plant_bugs(rng.choice((1, 1, BUGS_MAX)))
            case "too many bugs":
                self._plant_bugs(BUGS_MAX)
            case _:
                await self._for_a_while(kind, node, number)

    def choose_node(self) -> SmallSystem:
        """Return the node of the next fault."""
        return self.system

    def _plant_bugs(self, count: int) -> None:
        self.system.decode.bugs = count
        self.happened.add("bugs")
        if count > 1:
            self.happened.add("too many bugs")

    async def _for_a_while(self, kind: str, node: SmallSystem, number: int) -> None:
        lasts_s = self.rng.random() * 4
        self.releases.wrong(kind, lasts_s)
        match kind:
            case "start fails":
                node.starts_fail = True
                if number in node.hosts:  # else it has not started for the first time
                    node.hosts[number].crash()
                await trio.sleep(lasts_s)
                node.starts_fail = False
            case "stuck":
                node.costs.stuck = True
                await trio.sleep(lasts_s)
                node.costs.stuck = False
            case "slow":
                node.costs.slow = 50.0
                await trio.sleep(lasts_s)
                node.costs.slow = 1.0

    def _wire(self, kind: str, node: SmallSystem, number: int) -> SimTransport:
        return node.transports["front" if "front" in kind else f"line {number}"]
