"""Workers as a router asks them: of this node, of this node on behalf of another, of another node over its link."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias, cast

import trio
from attrs import define, evolve, field

from actors._kit import Address, Answer
from actors._queue import Queue
from actors.engines.port import Engine
from actors.routing.load import Load
from protocol.cluster import COUNT_MAX, Leg, Offer
from protocol.errors import ActorLost, BadRequest, LinkLost, NotReady
from protocol.messages import REQUEST_ID_LENGTH, Finished, Generate, Started, Tokens
from supervisor.link import Link
from supervisor.plug import Plug

Replies: TypeAlias = Answer[Started | Tokens, Finished]

REQUEST_ID = re.compile(rf"[0-9a-f]{{{REQUEST_ID_LENGTH}}}")


class Siblings(Protocol):
    """Whoever knows the other workers of the cluster."""

    def others(self, but: Here) -> bool:
        """Whether another worker of the same model and leg can be asked now, or one that computes both."""


@define(eq=False)
class Here:
    """A worker of this node."""

    node: str
    offered: Offer  # as it is when nothing runs
    address: Address[Generate, Started | Tokens, Finished]
    plug: Plug[Engine]
    changed: trio.lowlevel.ParkingLot
    inbox: Queue[Generate, Started | Tokens, Finished]
    directory: Siblings
    busy: int = 0
    tokens: int = 0

    @property
    def offer(self) -> Offer:
        """How the worker is now."""
        last, slots = self.plug.last, self.offered.slots
        return evolve(
            self.offered,
            up=self.plug.now is not None,
            why=self.plug.why,
            engine=None if last is None else last.info,
            running=min(self.busy, slots),
            waiting=max(0, self.busy - slots),
            tokens=min(self.tokens, COUNT_MAX),
        )

    @property
    def load(self) -> Load:
        """How busy it is."""
        return Load(f"{self.node}/{self.offered.name}", self.busy, self.offered.slots, self.tokens)

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""
        return self.offered.leg

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""
        return None if self.plug.now is None else self.plug.now.info.bootstrap

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Replies]:
        """Ask, waiting while its inbox is full; leaving the context is leaving the answer.

        Raises `NotReady` if its engine is down and another worker of its kind is not: who can be asked elsewhere need
        not wait for a restart.
        """
        if self.plug.now is None and self.directory.others(self):
            raise NotReady(f"engine {self.offered.name} is starting")
        tokens = len(request.tokens) + max(0, request.sampling.tokens_max)  # what asks may come from another node
        self.busy += 1
        self.tokens += tokens
        self.changed.unpark_all()  # other nodes are to hear of it
        try:
            async with self.address.ask(request, credit) as replies:
                yield replies
        finally:
            self.busy -= 1
            self.tokens -= tokens
            self.changed.unpark_all()

    def turn_away(self) -> None:
        """Fail what nobody has taken out of the inbox, if there is another worker of its kind that can."""
        if self.directory.others(self):
            self.inbox.turn_away(ActorLost(f"the engine {self.offered.name} is gone"))


@define(eq=False)
class ForOthers:
    """A worker of this node as other nodes ask it, who may lie: no engine hears of a request that could harm others."""

    here: Here
    _ids: set[str] = field(factory=set)

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
            async with self.here.ask(request, credit) as replies:
                yield replies
        finally:
            self._ids.discard(request.id)


@define(eq=False)
class There:
    """A worker of another node, by what that node tells of it and by what this node has asked of it."""

    node: str
    offer: Offer
    changed: trio.lowlevel.ParkingLot
    link: Link | None = None
    busy: int = 0  # with what this node asks

    @property
    def load(self) -> Load:
        """How busy it is; what it tells is some moments old, so it is at least as busy as this node makes it."""
        told = self.offer.running + self.offer.waiting
        return Load(f"{self.node}/{self.offer.name}", max(self.busy, told), self.offer.slots, self.offer.tokens)

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
        self.busy += 1
        try:
            async with self.link.ask(request, credit, self.offer.name) as replies:
                yield cast("Replies", replies)  # a worker answers a Generate with nothing else
        finally:
            self.busy -= 1
            self.changed.unpark_all()
