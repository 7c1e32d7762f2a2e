"""Faults of encoders, of decoders of images and videos, and of the hosts of these.

They may cost requests with pictures what is listed here, and requests without any nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import trio
from attrs import Factory, define

from actors.engines.simulated.spec import Faults as EngineFaults
from protocol.errors import ActorError, EngineStuck, StartFailed
from tests.system.simulator.encoders import NodeEncoders, SimEncoder
from tests.system.simulator.system import System

LOST = frozenset({"engine_lost", "actor_lost", "not_ready"})
LATE = frozenset({"deadline_exceeded"})
RESUMABLE = frozenset({"engine_lost", "actor_lost", "link_lost", "link_replaced", "draining"})
PICTURE_ERRORS: dict[str, frozenset[str]] = {
    "encoder crash": LOST,
    "encoder slow": LOST | LATE,  # one that keeps a batch for too long after its end is replaced
    "encoder stuck": LOST | LATE,  # it keeps a batch whose askers have left
    "encoder stalls": LOST | LATE,  # no batch ends
    "encoder start fails": LOST,
    "wrong rows": frozenset({"internal"}),  # the encoder returns embeddings of other sizes
    "hosts stall": LATE,
    "decoders die": frozenset({"not_ready"}) | LATE,
    "anything": LOST | LATE | {"internal"},  # that may be broken
    # No faults, but the results of small limits.
    "crowded": frozenset({"overloaded"}) | LATE,
}
PICTURE_FAULTS = tuple(kind for kind in PICTURE_ERRORS if kind not in {"anything", "crowded"})
OF_ENCODERS = tuple(kind for kind in PICTURE_FAULTS if "encoder" in kind or kind == "wrong rows")
PICTURE_FALLS: dict[str, tuple[type[ActorError], ...]] = {
    "encoder stuck": (EngineStuck,),
    "encoder stalls": (EngineStuck,),
    "encoder slow": (EngineStuck,),
    "encoder start fails": (StartFailed,),
}
UNDER_A_TENSOR = {"cut under a tensor": "cut a link", "half-open under a tensor": "half-open link"}
"""Faults of a link across which pixels or embeddings are on their way, and the faults of any link that they are."""
AT_ONCE = {"encoder crash": 1, "encoder slow": 2}  # encoders that are lost by it; by others one again and again
MANY = 100
BACK_WITHIN_S = 3.0


@define(eq=False)
class PictureFaults:
    """Injects the faults that the seed draws, and records what they may cost requests with pictures."""

    system: System
    rng: random.Random
    note: Callable[..., None]
    allowed: dict[str, frozenset[str]]  # the errors of each fault of anything else that may befall an encoder
    happened: set[str] = Factory(set)
    losses: int = 0  # how often an encoder, or the link to it, may have been lost
    deaths: int = 0  # how often it may have been an encoder that died
    away: bool = False  # all may have been out of reach for long

    def may(self, code: str) -> bool:
        """Whether a request with pictures may end in this error by the faults so far."""
        errors = PICTURE_ERRORS | self.allowed
        causes = {kind for kind in self.happened if code in errors[kind]}
        if code in RESUMABLE and not self.retry_may_fail:
            causes = {kind for kind in causes if not errors[kind] & {"engine_lost", "link_lost"}}
        return bool(causes)

    @property
    def retry_may_fail(self) -> bool:
        """Whether an item that lost its encoder may have found no other, or exceeded its limits."""
        route = self.system.route
        away = self.away or route.resume_s < BACK_WITHIN_S
        return away or "anything" in self.happened or self.losses > route.resumes_max or self.deaths > route.crashes_max

    def lost(self, kind: str, *, away: bool) -> None:
        """Record that an encoder is lost by another fault: of its node, or of the link to it."""
        self.happened.add(kind)
        self.losses += 1
        self.away = self.away or away

    async def one(self, kind: str) -> None:
        """Inject one fault at a random moment, and remove it later."""
        await trio.sleep(self.rng.random() * 3)
        await self.now(kind)

    async def now(self, kind: str) -> None:
        """Inject one fault now, and remove it later."""
        lasts_s = self.rng.random() * 4
        if kind in OF_ENCODERS:
            if (chosen := self._choose()) is not None:
                self._record(kind)
                await self._of_encoder(kind, *chosen, lasts_s)
            return
        self._record(kind)
        if kind == "hosts stall":
            self.system.media.hosts_stall_until = trio.current_time() + lasts_s
        else:
            self.system.media.kill_decoders(lasts_s)

    def nodes(self) -> list[NodeEncoders]:
        """Return the encoders of each node that is up and has some."""
        return [self.system.encoding] if self.system.encoding.count else []

    def _record(self, kind: str) -> None:
        self.happened.add(kind)
        self.note(kind)
        if "engine_lost" in PICTURE_ERRORS[kind]:
            self.losses += AT_ONCE.get(kind, MANY)
            self.deaths += AT_ONCE.get(kind, MANY)

    def _choose(self) -> tuple[NodeEncoders, SimEncoder] | None:
        """Choose one encoder that has started, rather a busy one."""
        engines = [(node, engine) for node in self.nodes() for engine in node.engines.values()]
        busy = [(node, engine) for node, engine in engines if engine.held]
        return self.rng.choice(busy or engines) if engines else None

    async def _of_encoder(self, kind: str, node: NodeEncoders, engine: SimEncoder, lasts_s: float) -> None:
        match kind:
            case "encoder crash":
                engine.crash()
            case "encoder slow":
                engine.inject(EngineFaults(slow=30.0))
                await trio.sleep(lasts_s)
                engine.inject(EngineFaults())
            case "encoder stuck":
                engine.inject(EngineFaults(stuck=1.0))
                await trio.sleep(lasts_s)
                engine.inject(EngineFaults())
            case "encoder stalls":
                engine.stall(self.rng.choice((lasts_s, inf)))
            case "encoder start fails":
                node.starts_fail = True
                engine.crash()
                await trio.sleep(lasts_s)
                node.starts_fail = False
            case _:
                node.costs.wrong = True
                await trio.sleep(lasts_s)
                node.costs.wrong = False
