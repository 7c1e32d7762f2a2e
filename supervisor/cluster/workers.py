"""Workers as a router asks them: of this node, of this node on behalf of another, of another node over its link."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias, cast

from attrs import define, evolve, field

from actors.engines.port import Engine
from actors.kit.calls import Address, Answer
from actors.kit.pending_prefill import PendingPrefill
from actors.kit.priority_inbox import PriorityInbox
from actors.routing.load import Load
from protocol.cluster import COUNT_MAX, Leg, Offer, OfferLoad
from protocol.errors import ActorLost, BadRequest, LinkLost, NotReady
from protocol.messages import REQUEST_ID_LENGTH, Finished, Generate, Started, Tokens
from supervisor.links.link import Link
from supervisor.supervision.changes import Changes
from supervisor.supervision.registration import Registration

Replies: TypeAlias = Answer[Started | Tokens, Finished]

REQUEST_ID = re.compile(rf"[0-9a-f]{{{REQUEST_ID_LENGTH}}}")


class Siblings(Protocol):
    """Whoever knows the other workers of the cluster."""

    def others(self, but: LocalWorker) -> bool:
        """Whether another worker of the same model and leg can be asked now, or one that computes both."""

    def loaded(self, worker: LocalWorker | RemoteWorker, asker: str | None) -> None:
        """Hear that a worker has one request more, or one less, and which other node asks it, if one does."""

    def begun(self, worker: LocalWorker | RemoteWorker) -> None:
        """Hear that a worker has begun a request that this node asks, so that it may have room for another prompt."""


def _tokens_of(request: Generate) -> int:
    return len(request.tokens) + max(0, request.sampling.tokens_max)  # what asks may come from another node


def _bounds(offer: Offer) -> tuple[int, int]:
    """Return how many tokens of prompts a worker has at most, by itself and shared by those that it works for."""
    most = offer.pending_prefill_tokens_max
    return (0, most) if offer.leg is Leg.PREFILL else (most, 0)


@define(eq=False)
class LocalWorker:
    """A worker of this node."""

    node: str
    offered: Offer  # as it is when nothing runs
    address: Address[Generate, Started | Tokens, Finished]
    plug: Registration[Engine]
    changed: Changes
    inbox: PriorityInbox[Generate, Started | Tokens, Finished]
    directory: Siblings
    busy: int = 0
    tokens: int = 0
    asked_by: dict[str, tuple[int, int]] = field(factory=dict)  # other nodes: requests and tokens of each
    pending: PendingPrefill = field(factory=PendingPrefill)  # of what this node asks

    @property
    def model(self) -> str:
        """The model that it serves."""
        return self.offered.model

    @property
    def offer(self) -> Offer:
        """How the worker is now."""
        last, slots = self.plug.last, self.offered.slots
        return evolve(
            self.offered,
            up=self.plug.current is not None,
            why=self.plug.unavailable_reason,
            engine=None if last is None else last.info,
            running=min(self.busy, slots),
            waiting=max(0, self.busy - slots),
            tokens=min(self.tokens, COUNT_MAX),
        )

    @property
    def load(self) -> Load:
        """How busy it is; its requests are promised the KV memory of all tokens that they may come to."""
        last = self.plug.last
        kv_tokens_max = 0 if last is None or last.info is None else last.info.kv_tokens_max
        slots, tokens = self.offered.slots, self.tokens
        name, bounds = f"{self.node}/{self.offered.name}", _bounds(self.offered)
        return Load(name, self.busy, slots, tokens, tokens, kv_tokens_max, self.pending.tokens, *bounds, self.leg)

    def load_without(self, hearer: str) -> OfferLoad:
        """Return how busy it is with what everybody but one other node asks."""
        requests, tokens = self.asked_by.get(hearer, (0, 0))
        return OfferLoad(self.offered.name, self.busy - requests, min(self.tokens - tokens, COUNT_MAX))

    def offer_for(self, hearer: str) -> Offer:
        """Return how the worker is now, as that node is to hear it."""
        load, slots = self.load_without(hearer), self.offered.slots
        running, waiting = min(load.requests, slots), max(0, load.requests - slots)
        return evolve(self.offer, running=running, waiting=waiting, tokens=load.tokens)

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""
        return self.offered.leg

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""
        return None if self.plug.current is None else self.plug.current.info.bootstrap

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int, asker: str | None = None) -> AsyncIterator[Replies]:
        """Ask, waiting while its inbox is full; leaving the context is leaving the answer.

        Raises `NotReady` if its engine is down and another worker of its kind is not: who can be asked elsewhere need
        not wait for a restart.
        """
        if self.plug.current is None and self.directory.others(self):
            raise NotReady(f"engine {self.offered.name} is starting")
        tokens = _tokens_of(request)
        if asker is None:
            self.pending.add(request.id, len(request.tokens))
        self._count(asker, 1, tokens)
        try:
            async with self.address.ask(request, credit) as replies:
                yield replies
        finally:
            self.pending.discard(request.id)
            self._count(asker, -1, -tokens)

    def begun(self, request_id: str) -> None:
        """Hear that the first token of a request is there, so that its prompt is pending no more."""
        if self.pending.discard(request_id):
            self.directory.begun(self)

    def _count(self, asker: str | None, more: int, tokens: int) -> None:
        self.busy += more
        self.tokens += tokens
        if asker is not None:
            requests, held = self.asked_by.pop(asker, (0, 0))
            if requests + more:
                self.asked_by[asker] = requests + more, held + tokens
        self.directory.loaded(self, asker)

    def turn_away(self) -> None:
        """Fail what nobody has taken out of the inbox, if there is another worker of its kind that can."""
        if self.directory.others(self):
            self.inbox.turn_away(ActorLost(f"the engine {self.offered.name} is gone"))


@define(eq=False)
class GuardedWorker:
    """A worker of this node as other nodes ask it, who may lie: no engine hears of a request that could harm others."""

    here: LocalWorker
    asker: str | None = None  # the other node
    _ids: set[str] = field(factory=set)

    def of(self, asker: str) -> GuardedWorker:
        """Return the same worker as one other node asks it."""
        return evolve(self, asker=asker)

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Replies]:
        """Ask as `Here.ask` does; raises `BadRequest` for an id that is none or in use, and for too little credit."""
        if REQUEST_ID.fullmatch(request.id) is None:
            raise BadRequest("a request's id is 32 hexadecimal digits")
        if request.id in self._ids:
            raise BadRequest(f"the request {request.id} is being answered already")
        if credit < request.sampling.tokens_max:
            raise BadRequest(f"credit for {credit} tokens, where {request.sampling.tokens_max} are asked for")
        self._ids.add(request.id)
        try:
            async with self.here.ask(request, credit, self.asker) as replies:
                yield replies
        finally:
            self._ids.discard(request.id)


@define(eq=False)
class RemoteWorker:
    """A worker of another node, by what that node tells of it and by what this node has asked of it."""

    node: str
    offer: Offer
    directory: Siblings
    link: Link | None = None
    busy: int = 0  # with what this node asks
    tokens: int = 0  # of those
    pending: PendingPrefill = field(factory=PendingPrefill)  # of those, too

    @property
    def model(self) -> str:
        """The model that it serves."""
        return self.offer.model

    @property
    def load(self) -> Load:
        """How busy it is: with what this node asks now, and with what others ask, by what it told last of those."""
        offer = self.offer
        tokens = self.tokens + offer.tokens
        kv_tokens_max = 0 if offer.engine is None else offer.engine.kv_tokens_max
        busy = self.busy + offer.running + offer.waiting
        name, bounds = f"{self.node}/{offer.name}", _bounds(offer)
        return Load(name, busy, offer.slots, tokens, tokens, kv_tokens_max, self.pending.tokens, *bounds, self.leg)

    def judged(self, offer: Offer) -> None:
        """Note another offer of the same worker, which is as busy as before."""
        last = self.offer
        self.offer = evolve(offer, running=last.running, waiting=last.waiting, tokens=last.tokens)

    def told(self, load: OfferLoad) -> None:
        """Note how busy others make it."""
        running = min(load.requests, self.offer.slots)
        self.offer = evolve(self.offer, running=running, waiting=load.requests - running, tokens=load.tokens)

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""
        return self.offer.leg

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""
        return None if self.offer.engine is None else self.offer.engine.bootstrap

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Replies]:
        """Ask over the link, waiting while it carries as many streams as it may; raises `LinkLost` if it is down."""
        if self.link is None:
            raise LinkLost(f"there is no link to node {self.node}")
        tokens = _tokens_of(request)
        self.pending.add(request.id, len(request.tokens))
        self._count(1, tokens)
        try:
            async with self.link.ask(request, credit, self.offer.name) as replies:
                yield cast("Replies", replies)  # a worker answers a Generate with nothing else
        finally:
            self.pending.discard(request.id)
            self._count(-1, -tokens)

    def begun(self, request_id: str) -> None:
        """Hear that the first token of a request is there, so that its prompt is pending no more."""
        if self.pending.discard(request_id):
            self.directory.begun(self)

    def _count(self, more: int, tokens: int) -> None:
        self.busy += more
        self.tokens += tokens
        self.directory.loaded(self, None)
