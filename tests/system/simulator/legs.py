"""Engines of which one computes the prompt and another the answer: they meet in a room, and one without the other waits."""

from __future__ import annotations

from math import inf

import trio
from attrs import Factory, define, evolve, field

from protocol.cluster import Leg
from protocol.errors import RequestError
from protocol.messages import EngineInfo, Finished, FinishReason, Generate, HandOff, Usage
from tests.rig.fake_engine import Costs, Turn, _Held
from tests.system.simulator.system import Seeded, SeededHost

BOTH_WITHIN_S = 1.0  # from the end of one leg to the end of the other, a release not counted
OTHER = {Leg.PREFILL: Leg.DECODE, Leg.DECODE: Leg.PREFILL}


@define
class LegCosts(Costs):
    """What one leg's engine is made of."""

    leg: Leg = Leg.BOTH
    node: str = ""

    @property
    def info(self) -> EngineInfo:
        whole = Costs.info.fget(self)
        if self.leg is Leg.BOTH:
            return whole
        return evolve(whole, hand_off=HandOff.RENDEZVOUS, bootstrap=(self.node, 1) if self.leg is Leg.PREFILL else None)


@define(eq=False)
class Room:
    """Where a prefill and a decode meet for one request."""

    request: Generate
    legs: dict[Leg, Seeded] = Factory(dict)  # who has been asked for which
    transferred_at: float = inf
    alone_since: float | None = None

    def holds(self, leg: Leg) -> bool:
        """Whether the engine of a leg lives and holds its part of the request."""
        engine = self.legs[leg]
        return not engine.crashed.is_set() and engine.holds(self.request.id)

    def runs(self, leg: Leg) -> bool:
        """Whether it lives and has begun with its part."""
        engine = self.legs[leg]
        return not engine.crashed.is_set() and self.request.id in engine.running

    @property
    def over_early(self) -> Leg | None:
        """The leg that has ended, and should have ended the other, if there is one."""
        if len(self.legs) < 2:
            return None
        prefill, decode = self.holds(Leg.PREFILL), self.holds(Leg.DECODE)
        if prefill and not decode:
            return Leg.DECODE
        unmet = self.transferred_at > trio.current_time()
        return Leg.PREFILL if decode and not prefill and unmet else None


@define(eq=False)
class Rooms:
    """The rooms of a cluster, and who is in them."""

    transfer_s: float = 0.0
    rooms: dict[int, Room] = Factory(dict)
    met: int = 0
    sick: tuple[Seeded, RequestError] | None = None  # whose hand-offs fail, and with what

    def enter(self, engine: Seeded, leg: Leg, request: Generate) -> None:
        """Note that an engine was asked for one leg of a request."""
        assert request.rendezvous is not None, "one leg was asked for all of a request"
        room = self.rooms.setdefault(request.rendezvous.room, Room(request))
        assert leg not in room.legs, "a room was used twice"
        asked = (request.tokens, request.rendezvous, request.said)
        assert asked == (room.request.tokens, room.request.rendezvous, room.request.said), (
            "the legs were asked otherwise"
        )
        room.legs[leg] = engine

    def computed(self, request: Generate) -> float:
        """Note that the prompt is computed; return from when on the other leg has it, which may be never.

        It takes it once it has a slot and memory for it.
        """
        room = self.rooms[request.rendezvous.room]
        if room.transferred_at == inf and Leg.DECODE in room.legs and room.runs(Leg.DECODE):
            room.transferred_at = trio.current_time() + self.transfer_s
            self.met += 1
        return room.transferred_at

    def transferred_at(self, request: Generate) -> float:
        """Return from when on the decode has what it needs."""
        return self.rooms[request.rendezvous.room].transferred_at

    def fails(self, request: Generate) -> bool:
        """Whether the hand-off of a request fails: both legs are there, and one of them is sick."""
        engines = self.rooms[request.rendezvous.room].legs.values()
        return self.sick is not None and len(engines) == len(OTHER) and self.sick[0] in engines

    def held(self) -> list[tuple[Leg, Seeded]]:
        """Return every engine that computes one leg at the moment, once for each request."""
        legs = [(room, leg) for room in self.rooms.values() for leg in room.legs]
        return [(leg, room.legs[leg]) for room, leg in legs if room.holds(leg)]

    def lonely(self) -> list[tuple[int, Room, Leg]]:
        """Return the rooms in which one leg goes on without the other, and which has gone, and note since when."""
        found = []
        for number, room in self.rooms.items():
            gone = room.over_early
            if gone is None:
                room.alone_since = None
            else:
                room.alone_since = trio.current_time() if room.alone_since is None else room.alone_since
                found.append((number, room, gone))
        return found


@define(eq=False)
class _Leg(Seeded):
    """Computes one part of requests, or all of them."""

    leg: Leg = Leg.BOTH
    rooms: Rooms = field(factory=Rooms)

    def submit(self, request: Generate) -> None:
        assert (request.rendezvous is None) == (self.leg is Leg.BOTH), "an engine was asked for another's leg"
        Seeded.submit(self, request)
        if self.leg is not Leg.BOTH:
            self.rooms.enter(self, self.leg, request)
        if self.leg is Leg.PREFILL:
            held = self.waiting[-1]
            held.ids = held.ids[:1]
            held.finished = Finished(FinishReason.LENGTH, Usage(len(request.tokens), 1))

    def _step(self, now: float) -> None:
        for held in list(self.running.values()):
            if self.fails is not None:
                held.ready_at = now
            elif self.leg is Leg.DECODE and self.rooms.fails(held.request):
                self._fail(held)
            elif self.leg is Leg.PREFILL and (held.ready_at <= now or held.ready_at == inf):
                held.ready_at = self.rooms.computed(held.request)
            elif self.leg is Leg.DECODE:
                held.ready_at = self.rooms.transferred_at(held.request)
        Seeded._step(self, now)

    def _fail(self, held: _Held) -> None:
        engine, error = self.rooms.sick
        engine.failed += 1
        self._ended(held.request.id)
        self.tell(Turn(failed=[(held.request.id, error)]))

    def _remember(self, request_id: str) -> None:
        if self.leg is not Leg.PREFILL:
            Seeded._remember(self, request_id)


@define(eq=False)
class LegHost(SeededHost):
    """A fake engine's host that computes one leg."""

    rooms: Rooms = field(factory=Rooms)

    def __attrs_post_init__(self) -> None:
        SeededHost.__attrs_post_init__(self)
        assert isinstance(self.costs, LegCosts)
        self.scheduler = _Leg(self.costs, self._told, leg=self.costs.leg, rooms=self.rooms)

    async def run(self) -> None:
        """Serve until the link ends; the process ends with it, and nothing is computed any more."""
        try:
            await SeededHost.run(self)
        finally:
            self.scheduler.crash()
