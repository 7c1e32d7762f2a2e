"""What workers tell of their prefix caches, spoiled on its way: lost, repeated, late, or made up by a liar."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from attrs import define, evolve, field

from actors.kit.calls import Answer
from protocol.errors import AskerLeft, PeerViolation, RequestError
from protocol.messages.kind import Message
from protocol.messages.kv_events import BlockChange, BlockEvent, BlockEvents, WatchBlocks
from supervisor.links.serving import Service

SHARE = 0.3  # of the replies after the first, those that are spoiled
LIES_MAX = 64  # blocks of others that a lie claims
FAR_AHEAD = 10**9, 2 * 10**9  # numbers that follow no other; a list whose last part was lost ends with the first one


@define(eq=False)
class Spoiling:
    """How the events of all workers of a run are spoiled, until `heal`."""

    kind: str  # "" for not at all
    rng: random.Random
    ever: set[int]  # every block that was in a cache
    spoiled: int = 0
    original: str = field(init=False)  # kind, before it healed
    _streams: dict[int, tuple[Answer[Message, Message], str]] = field(factory=dict)  # the open ones, with their lives
    _kept: list[BlockEvents] = field(factory=list)  # that came, some of them of a former life

    def __attrs_post_init__(self) -> None:
        self.original = self.kind

    def heal(self) -> None:
        """Spoil nothing more, and let all who watch notice a gap."""
        self.kind = ""
        for answer, life in self._streams.values():
            for number in FAR_AHEAD:
                if answer.credit > 0:
                    answer.put(BlockEvents(life, number, ()))

    def of(self, service: Service) -> Service:
        """Return a service whose `BlockEvents` are spoiled, if any are in this run."""
        return SpoiledService(service, self) if self.original else service

    def opened(self, answer: Answer[Message, Message]) -> None:
        self._streams[id(answer)] = answer, "unknown"

    def closed(self, answer: Answer[Message, Message]) -> None:
        del self._streams[id(answer)]

    def spoil(self, answer: Answer[Message, Message], events: BlockEvents) -> None:
        """Put what becomes of some events into an answer."""
        self._streams[id(answer)] = answer, events.life
        for each in self._replies(events):
            if answer.credit > 0:
                answer.put(each)

    def _replies(self, events: BlockEvents) -> Sequence[BlockEvents]:
        if not self.kind or (self.spoiled and self.rng.random() >= SHARE):
            return [events]
        self.spoiled += 1
        self._kept.append(events)
        match self.kind:
            case "lost":
                return []
            case "repeated":
                return [events, events]
            case "late":
                return [self.rng.choice(self._kept), *([events] if self.rng.random() < 0.5 else [])]
            case _:
                known = sorted(self.ever)
                return [_claiming(events, self.rng.sample(known, min(len(known), LIES_MAX)))]


def _claiming(events: BlockEvents, hashes: Sequence[int]) -> BlockEvents:
    """Return events that claim further blocks, and have the numbers of true ones."""
    claim = BlockEvent(BlockChange.STORED, 0, tuple(hashes))
    *others, last = events.events or (claim,)
    if last.change is BlockChange.STORED:
        claim = evolve(last, hashes=last.hashes + claim.hashes)
    return evolve(events, events=(*others, claim)) if events.events else events


@define(eq=False)
class SpoiledService:
    """A service that answers `WatchBlocks` with spoiled events."""

    service: Service
    spoiling: Spoiling

    @asynccontextmanager
    async def ask(self, request: Message, credit: int) -> AsyncIterator[Answer[Message, Message]]:
        async with self.service.ask(request, credit) as answer:
            assert isinstance(request, WatchBlocks)
            spoiled: Answer[Message, Message] = Answer(credit)
            self.spoiling.opened(spoiled)
            failure: Exception | None = None
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_on, answer, spoiled, name="spoiled")
                    try:
                        yield spoiled
                    except (PeerViolation, RequestError) as error:  # which must not come out in a group
                        failure = error
                    nursery.cancel_scope.cancel(reason="the asker left")
                if failure is not None:
                    raise failure
            finally:
                self.spoiling.closed(spoiled)
                spoiled.fail(AskerLeft("the asker left"))

    async def _pass_on(self, answer: Answer[Message, Message], spoiled: Answer[Message, Message]) -> None:
        def receive(reply: Message) -> None:
            assert isinstance(reply, BlockEvents)
            self.spoiling.spoil(spoiled, reply)

        try:
            spoiled.end(await answer.relay(receive))
        except RequestError as error:
            spoiled.fail(error)
