"""What goes wrong, and what a server may truthfully say because of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio
from attrs import Factory, define, field

from protocol.errors import ActorError, EngineStuck, StartFailed, TooManyBugs
from tests.sim.freeing import Freeing
from tests.sim.network import SimTransport
from tests.sim.system import System

LOST = frozenset({"engine_lost", "actor_lost"})
LATE = frozenset({"deadline_exceeded"})
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
    "drain": frozenset({"draining", "unanswered"}),
    # No faults of anybody, but what small limits come to.
    "impatient": LATE,
    "trickles": LOST | LATE,  # a Cancel that waits behind much else looks like an engine that keeps its slot
}
FAULTS = tuple(kind for kind in TRUTHS if kind not in {"drain", "impatient", "trickles"})
FALLS: dict[str, tuple[type[ActorError], ...]] = {  # by what an actor may fall, beside a lost engine or a lost link
    "half-open line": (EngineStuck, StartFailed),
    "stuck": (EngineStuck,),
    "start fails": (StartFailed,),
    "jump": (EngineStuck, StartFailed),
    "bugs": (TooManyBugs,),
    "trickles": (EngineStuck, StartFailed),
}


@define(eq=False)
class Faults:
    """Makes things go wrong as the seed says, and remembers what has."""

    system: System
    rng: random.Random
    note: Callable[..., None]
    happened: set[str] = Factory(set)
    freeing: Freeing = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.freeing = Freeing(self.system.deadlines.release_s)

    def may(self, code: str) -> bool:
        """Whether an error with this code is true by now."""
        crowded = code == "overloaded" and self.system.door.gate.was_full
        return crowded or any(code in TRUTHS[kind] for kind in self.happened)

    async def one(self, kind: str) -> None:
        """Let one thing go wrong at some moment."""
        rng, system = self.rng, self.system
        await trio.sleep(rng.random() * 3)
        number = rng.randrange(system.workers)
        if "front" in kind and not system.far:
            return
        self.happened.add(kind)
        self.note(kind, number)
        match kind:
            case "crash":
                system.hosts[number].crash()
            case "cut the line" | "cut the front":
                self._wire(kind, number).cut()
            case "half-open line" | "half-open front":
                wire, lasts_s = self._wire(kind, number), rng.random() * 6
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
                    self.happened.add("crash")  # too many: the processor falls
            case _:
                await self._for_a_while(kind, number)

    async def _for_a_while(self, kind: str, number: int) -> None:
        system, lasts_s = self.system, self.rng.random() * 4
        self.freeing.wrong(kind, lasts_s)
        match kind:
            case "start fails":
                system.starts_fail = True
                system.hosts[number].crash()
                await trio.sleep(lasts_s)
                system.starts_fail = False
            case "stuck":
                system.costs.stuck = True
                await trio.sleep(lasts_s)
                system.costs.stuck = False
            case "slow":
                system.costs.slow = 50.0
                await trio.sleep(lasts_s)
                system.costs.slow = 1.0

    def _wire(self, kind: str, number: int) -> SimTransport:
        return self.system.wires["front" if "front" in kind else f"line {number}"]
