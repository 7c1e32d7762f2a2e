"""Prefill and decode engines: they meet in a room for each request, and one without the other waits.

Sequential ones have a room for each request too, in which no prefill waits: it holds a state until it is left.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio
from attrs import Factory, define, evolve, field

from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.step import BatchUpdate
from protocol.errors import RequestError
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate
from protocol.messages.media import MediaForm
from tests.rig.fake_engine import Costs, FakeEngine
from tests.rig.fake_host import FakeHost
from tests.rig.small_system import CANARY
from tests.system.simulator.engines import SeeingEngine, SeeingScheduler

BOTH_WITHIN_S = 1.0  # from the end of one leg to the end of the other, a release not counted
OTHER = {Leg.PREFILL: Leg.DECODE, Leg.DECODE: Leg.PREFILL}


@define
class LegCosts(Costs):
    """The costs of one leg's engine."""

    node: str = ""

    @property
    def info(self) -> EngineInfo:
        info = self.spec.info
        return evolve(info, hand_off_address=self.node.encode()) if self.leg is Leg.PREFILL else info


@define(eq=False)
class Room:
    """Where a prefill and a decode meet for one request."""

    request: Generate
    legs: dict[Leg, LegScheduler] = Factory(dict)  # the engine of each
    requests: dict[Leg, Generate] = Factory(dict)  # that each was asked
    computed: bool = False  # the prompt
    transferred_at: float = inf
    alone_since: float | None = None

    def holds(self, leg: Leg) -> bool:
        """Whether the engine of a leg lives and holds its part of the request."""
        engine = self.legs[leg]
        return not engine.crashed and engine.holds(self.request.id)

    def runs(self, leg: Leg) -> bool:
        """Whether it lives and has begun with its part."""
        engine = self.legs.get(leg)
        return engine is not None and not engine.crashed and self.request.id in engine.running

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
class Rooms(RendezvousRooms):
    """The rooms of a cluster and their legs; a prefill waits in one until a decode has taken its KV cache."""

    transfer_s: float = 0.0
    hand_off: HandOff = HandOff.CONCURRENT
    states: HeldStates = field(factory=HeldStates)
    rooms: dict[int | str, Room] = Factory(dict)
    met: int = 0
    failing: tuple[LegScheduler, RequestError] | None = None  # the engine whose hand-offs fail, and their error

    @property
    def is_sequential(self) -> bool:
        """Whether prefills return states."""
        return self.hand_off is HandOff.SEQUENTIAL

    def key(self, request: Generate) -> int | str | None:
        """Return the room of a leg's request, None for one without a partner."""
        if self.is_sequential:
            return None if request.id.startswith(CANARY) else request.id
        meeting = Rendezvous.decode(request.hand_off)
        return meeting.room if meeting.has_partner else None

    def enter(self, engine: LegScheduler, leg: Leg, request: Generate) -> None:
        """Note that an engine was asked for one leg of a request."""
        if (key := self.key(request)) is None:
            return
        room = self.rooms.setdefault(key, Room(request))
        assert leg not in room.legs, "a room was used twice"
        assert _asked(request) == _asked(room.request), "the legs were asked otherwise"
        assert self.is_sequential or request.hand_off == room.request.hand_off, "the legs were asked to meet elsewhere"
        assert leg is Leg.PREFILL or all(item.form is MediaForm.PLACES for item in request.media)
        room.legs[leg], room.requests[leg] = engine, request

    def expect(self, room: int) -> None:
        """A decode was asked: `enter` has noted it."""

    def accept(self, room: int) -> None:
        """The decode of a room has a slot and memory, or has gone; nothing of one without a partner."""
        if room in self.rooms:
            self._meet(self.rooms[room])

    def wait(self, room: int, tell: Callable[[], None]) -> bool:
        """The prompt of a room is computed; nobody waits for that of a request without a partner."""
        if room not in self.rooms:
            return False
        self.rooms[room].computed = True
        self._meet(self.rooms[room])
        return self.rooms[room].legs[Leg.PREFILL].fails is None

    def _meet(self, room: Room) -> None:
        """Let the KV cache go from one engine to the other, once the one has computed it and the other can take it."""
        if room.computed and room.transferred_at == inf and room.runs(Leg.DECODE) and room.runs(Leg.PREFILL):
            failing = [engine for engine in room.legs.values() if engine.fails is not None]
            if self.fails(room.request):
                failing = [room.legs[Leg.DECODE]]
            for engine in failing:
                engine.arrives(room.request.id, trio.current_time())
            if failing:
                return
            room.transferred_at = trio.current_time() + self.transfer_s
            self.met += 1
            for engine in room.legs.values():
                engine.arrives(room.request.id, room.transferred_at)

    def fails(self, request: Generate) -> bool:
        """Whether the hand-off of a request fails: both legs are there, and one of them fails."""
        if (key := self.key(request)) is None:
            return False
        engines = self.rooms[key].legs.values()
        return self.failing is not None and len(engines) == len(OTHER) and self.failing[0] in engines

    def held(self) -> list[tuple[Leg, LegScheduler]]:
        """Return every engine that computes one leg at the moment, once for each request."""
        legs = [(room, leg) for room in self.rooms.values() for leg in room.legs]
        return [(leg, room.legs[leg]) for room, leg in legs if room.holds(leg)]

    def arrived(self, request: Generate) -> None:
        """Note that a decode has taken a state."""
        if self.is_sequential and (key := self.key(request)) is not None:
            self.rooms[key].transferred_at = trio.current_time()
            self.met += 1

    def lonely(self) -> list[tuple[int | str, Room, Leg]]:
        """Yield the rooms in which one leg continues without the other, with the leg that ended; record since when."""
        found = []
        for number, room in self.rooms.items():
            gone = room.over_early
            if gone is None:
                room.alone_since = None
            else:
                room.alone_since = trio.current_time() if room.alone_since is None else room.alone_since
                found.append((number, room, gone))
        return found


def _asked(request: Generate) -> tuple[object, ...]:
    places = tuple(item.place for item in request.media)
    return request.tokens, request.resumed_tokens, places


@define(eq=False)
class LegScheduler(SeeingScheduler):
    """The scheduler of one leg, or of both; what a decode knows of a prompt is what its prefill has seen."""

    crashed: bool = False

    def prompt_of(self, request: Generate) -> tuple[int, ...]:
        if self.spec.leg is Leg.DECODE:
            if (key := self.rooms.key(request)) is None:
                return super().prompt_of(request)
            request = self.rooms.rooms[key].requests[Leg.PREFILL]
        return super().prompt_of(request)

    @property
    def frozen(self) -> bool:
        """Whether it will never compute again, nor release anything, until its canary has it replaced."""
        return self._stalled_until == inf

    @property
    def rooms(self) -> Rooms:
        assert isinstance(self.rendezvous_rooms, Rooms)
        return self.rendezvous_rooms

    def submit(self, request: Generate, now: float) -> None:
        wanted = self.live.info.is_decode if self.spec.is_sequential else self.spec.leg is not Leg.BOTH
        assert bool(request.hand_off) is wanted, "an engine was asked for another's leg"
        super().submit(request, now)
        if self.spec.leg is not Leg.BOTH:
            self.rooms.enter(self, self.spec.leg, request)

    def arrives(self, request_id: str, at: float) -> None:
        """Let a KV cache be there, or be taken, at that time."""
        held = self._transferring.get(request_id) or self.running[request_id]
        held.ready_at = at
        self.wake()

    def _admit(self, now: float) -> None:
        super()._admit(now)
        for held in self._transferring.values():
            if self.spec.leg is Leg.DECODE and self.rooms.key(held.request) is None:
                held.ready_at = now

    def close(self) -> None:
        self.crashed = True
        super().close()

    def _prefill_and_transfer_s(self, tokens: int) -> float:
        if self.fails is None:
            return self.rooms.transfer_s if self.spec.is_sequential else inf
        return 0.0

    def _begin(self, held: HeldRequest, update: BatchUpdate) -> None:
        if self.spec.leg is Leg.DECODE and self.fails is None and self.rooms.fails(held.request):
            assert self.rooms.failing is not None
            engine, error = self.rooms.failing
            engine.failed += 1
            self._fail(held, error, update)
        else:
            if self.spec.leg is Leg.DECODE:
                self.rooms.arrived(held.request)
            super()._begin(held, update)


class LegEngine(SeeingEngine):
    """An engine that computes one leg."""

    scheduler_of = LegScheduler  # type: ignore[mutable-override]


@define(eq=False)
class LegHost(FakeHost):
    """An engine's host that computes one leg."""

    rooms: Rooms = field(factory=Rooms)

    def _engine(self) -> FakeEngine:
        return LegEngine(self.costs, self.rooms, self.rooms.states)

    async def run(self) -> None:
        """Serve until the link ends; the process ends with it, and nothing is computed any more."""
        try:
            await FakeHost.run(self)
        finally:
            self.engine.crash()
