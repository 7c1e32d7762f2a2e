"""Workers: where the calls for one engine go, be it an engine of this node or at the other end of a link.

A router asks all of them alike. `LocalWorker` hands requests to an engine of this node, and `RemoteWorker` sends them
over the link to another node. An engine with several data-parallel ranks is as many workers, which share its inbox and
its life: each has a load of its own, and tells the engine by `Generate.rank` which of them a request is for.

A request counts in its worker's load from the turn in which it is asked until it has ended, at both ends of a link: a
router that asks twice in one turn must see its own first request.

`ask` is for what occupies the worker: an `Encode` if that is an encoder, else a `Generate`. `call` reaches everything
else that the worker's node serves under its name, by any message with a row in the message table.

None of them knows the directory: they report to a `SiblingDirectory`, and ask it whether others could serve as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias, cast, overload

from attrs import define, evolve, field

from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.kit.calls import Address, Answer, Askable
from actors.kit.pending_prefill import PendingPrefill
from actors.kit.priority_inbox import PriorityInbox
from actors.routing.load import Load
from protocol.cost import encoding_tokens, kv_tokens
from protocol.errors import ActorLost, LinkLost, NotReady
from protocol.messages.cluster import COUNT_MAX, Leg, Offer, OfferLoad, engine_and_rank
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded
from supervisor.links.link import Link
from supervisor.links.serving import Service
from supervisor.supervision.registration import Registration

Work: TypeAlias = Generate | Encode
"""A request that occupies a worker; an encoder gets the second, all others the first."""

Replies: TypeAlias = Answer[Started | Tokens, Finished]
EncodedReplies: TypeAlias = Answer[Encoded, Encoded]
"""The answer to an `Encode`: no replies, then its result."""

AnyReplies: TypeAlias = Replies | EncodedReplies
AnyAddress: TypeAlias = Askable[Message, Message, Message]

WorkAddress: TypeAlias = Address[Generate, Started | Tokens, Finished] | Address[Encode, Encoded, Encoded]
WorkInbox: TypeAlias = PriorityInbox[Generate, Started | Tokens, Finished] | PriorityInbox[Encode, Encoded, Encoded]


class SiblingDirectory(Protocol):
    """The part of the directory that a worker needs: the other workers, and the report of its own load."""

    def has_sibling(self, worker: LocalWorker) -> bool:
        """Whether another worker of the same model and leg can be asked now, or one that computes both legs."""

    def load_changed(self, worker: LocalWorker | RemoteWorker, asker: str | None) -> None:
        """Record that a worker has one request more or less; `asker` is the other node that it belongs to, if any."""

    @property
    def routers(self) -> tuple[int, int]:
        """The number of nodes that route, this one included, and its place among them by name."""

    def prefill_done(self, worker: RemoteWorker) -> None:
        """Record that a worker has begun to answer a request of this node, so that it may take another prompt."""


def _prefill_bounds(offer: Offer) -> tuple[int, int]:
    """Return a worker's limits on pending prompt tokens: `pending_max` and `shared_max` of its load."""
    tokens_max = offer.pending_prefill_tokens_max
    return (0, tokens_max) if offer.leg is Leg.PREFILL else (tokens_max, 0)


def _kv_memory(info: EngineInfo | None) -> tuple[int, int]:
    """Return the size of an engine's KV memory and of its pages, in tokens; 0 if not known."""
    return (0, 0) if info is None else (info.kv_tokens_max, info.page_size)


def _tokens(request: Work, leg: Leg) -> tuple[int, int]:
    """Return the tokens of a request that a leg computes before its first reply, and those that it may hold.

    What is cached is held, too, while the request runs; what several have in common counts for each of them.
    """
    if isinstance(request, Encode):
        return encoding_tokens(request), encoding_tokens(request)
    return request.uncached_tokens, kv_tokens(request, leg, 0)


def _of_rank(request: Work, rank: int) -> Work:
    """Return a request as one for a rank."""
    if isinstance(request, Encode) or request.rank == rank:
        return request
    return evolve(request, rank=rank)


@define(eq=False)
class LocalWorker:
    """A worker of this node: an engine, or one rank of it."""

    node: str
    idle_offer: Offer  # its offer while it has no request
    address: WorkAddress
    engine: Registration[Engine] | Registration[Encoder]
    inbox: WorkInbox
    directory: SiblingDirectory
    services: dict[type[Message], Service] = field(factory=dict)  # for `call`
    ranks: int = 1  # of its engine, of which it is one
    busy: int = 0
    tokens: int = 0
    asked_by: dict[str, tuple[int, int]] = field(factory=dict)  # by other node, its requests and their tokens
    pending: PendingPrefill = field(factory=PendingPrefill)  # of requests of this node
    queued_by: dict[str, PendingPrefill] = field(factory=dict)  # the same of each other node
    engine_name: str = field(init=False)  # on its node
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.engine_name, self.rank = engine_and_rank(self.idle_offer.name)

    @property
    def name(self) -> str:
        """Its name on its node."""
        return self.idle_offer.name

    @property
    def full_name(self) -> str:
        """Its name in the cluster."""
        return f"{self.node}/{self.idle_offer.name}"

    @property
    def model(self) -> str:
        """The model that it serves."""
        return self.idle_offer.model

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""
        return self.idle_offer.leg

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""
        return None if self.engine.current is None else self.engine.current.info.bootstrap

    @property
    def info(self) -> EngineInfo | None:
        """The info of its engine, also while that is out of service; None if it is down."""
        return None if self.engine.live is None else self.engine.live.info

    @property
    def offer(self) -> Offer:
        """Its offer at this moment."""
        last, slots = self.engine.last, self.idle_offer.slots
        return evolve(
            self.idle_offer,
            up=self.engine.current is not None,
            why=self.engine.unavailable_reason,
            engine=None if last is None else last.info,
            running=min(self.busy, slots),
            waiting=max(0, self.busy - slots),
            tokens=min(self.tokens, COUNT_MAX),
        )

    @property
    def load(self) -> Load:
        """Its load; KV memory counts as taken for the tokens that the requests may hold."""
        last = self.engine.last
        kv_tokens_max, page_size = _kv_memory(None if last is None else last.info)
        slots, tokens = self.idle_offer.slots, self.tokens
        name, bounds = self.full_name, _prefill_bounds(self.idle_offer)
        own = self.busy - sum(requests for requests, _ in self.asked_by.values())
        ours = own, self.pending.prompts, *self.directory.routers, 0, self.queued, page_size
        return Load(
            *(name, self.busy, slots, tokens, tokens, kv_tokens_max, self.pending.tokens, *bounds, self.leg, *ours)
        )

    @property
    def queued(self) -> int:
        """The tokens of prompts of all nodes that have no first token yet, but for those expected in its cache."""
        if not self.queued_by:
            return self.pending.tokens
        return self.pending.tokens + sum(pending.tokens for pending in self.queued_by.values())

    def load_without(self, node: str) -> OfferLoad:
        """Return its load without the requests of one other node, which counts those itself."""
        requests, tokens = self.asked_by.get(node, (0, 0))
        own = self.queued_by.get(node)
        queued = self.queued - (0 if own is None else own.tokens)
        return OfferLoad(self.name, self.busy - requests, min(self.tokens - tokens, COUNT_MAX), min(queued, COUNT_MAX))

    def offer_for(self, node: str) -> Offer:
        """Return its offer at this moment as it is announced to another node."""
        load, slots = self.load_without(node), self.idle_offer.slots
        running, waiting = min(load.requests, slots), max(0, load.requests - slots)
        return evolve(self.offer, running=running, waiting=waiting, tokens=load.tokens)

    @overload
    def ask(self, request: Generate, credit: int) -> AbstractAsyncContextManager[Replies]: ...

    @overload
    def ask(self, request: Encode, credit: int) -> AbstractAsyncContextManager[EncodedReplies]: ...

    def ask(self, request: Work, credit: int) -> AbstractAsyncContextManager[AnyReplies]:
        """Ask for this node, as `ask_for` does."""
        return self.ask_for(None, request, credit)

    @asynccontextmanager
    async def ask_for(self, asker: str | None, request: Work, credit: int) -> AsyncIterator[AnyReplies]:
        """Ask for another node, or None for this one, waiting while its inbox is full; leaving cancels the request.

        Raises `NotReady` if its engine is down and a sibling is not: a request that can be served elsewhere need not
        wait for a restart.
        """
        if self.engine.current is None and self.directory.has_sibling(self):
            raise NotReady(f"engine {self.engine_name} is starting")
        request = _of_rank(request, self.rank)
        first, tokens = _tokens(request, self.leg)
        pending = self.pending if asker is None else self.queued_by.setdefault(asker, PendingPrefill())
        pending.add(request.id, first)
        self._count(asker, 1, tokens)
        try:
            async with cast("AnyAddress", self.address).ask(request, credit) as replies:
                yield cast("AnyReplies", replies)
        finally:
            pending.discard(request.id)
            if asker is not None and not pending.prompts and self.queued_by.get(asker) is pending:
                del self.queued_by[asker]
            self._count(asker, -1, -tokens)

    async def call(self, request: Message) -> Message | None:
        """Ask for anything else that its node serves under its name, and return the result."""
        async with self.watch(request, 0) as answer:
            return await answer.result()

    def watch(self, request: Message, credit: int) -> AbstractAsyncContextManager[Answer[Message, Message]]:
        """Ask for a stream that its node serves under its name; raises `NotReady` if it does not."""
        if (service := self.services.get(type(request))) is None:
            raise NotReady(f"engine {self.engine_name} serves no {type(request).__name__}")
        return service.ask(request, credit)

    def begun(self, request_id: str) -> None:
        """Record that the first token of a request has come, so that its prompt is no longer pending."""
        if self.pending.discard(request_id):
            self.directory.load_changed(self, None)  # of which other nodes are to hear

    def computed(self, request_id: str) -> None:
        """Record that the prompt of one of its requests, of whichever node, has been computed."""
        for asker, pending in self.queued_by.items():
            if pending.discard(request_id):
                self.directory.load_changed(self, asker)
                return

    def reroute_queued(self) -> None:
        """Fail what waits in the inbox, if a sibling can serve it."""
        if not self.directory.has_sibling(self):
            return
        if self.engine.live is not None and not self.engine.in_service:
            self.inbox.turn_away(NotReady(f"engine {self.engine_name} {self.engine.status_text}"))
        else:
            self.inbox.turn_away(ActorLost(f"the engine {self.engine_name} is gone"))

    def _count(self, asker: str | None, requests: int, tokens: int) -> None:
        self.busy += requests
        self.tokens += tokens
        if asker is not None:
            requests_before, tokens_before = self.asked_by.pop(asker, (0, 0))
            if requests_before + requests:
                self.asked_by[asker] = requests_before + requests, tokens_before + tokens
        self.directory.load_changed(self, asker)


@define(eq=False)
class RemoteWorker:
    """A worker of another node: what that node announces of it, and the requests that this node has sent it."""

    node: str
    offer: Offer
    directory: SiblingDirectory
    link: Link | None = None
    busy: int = 0  # with requests of this node
    tokens: int = 0  # of those requests
    pending: PendingPrefill = field(factory=PendingPrefill)  # of those requests
    queued_by_others: int = 0  # the tokens of prompts that wait there, as its node announced them last
    engine_name: str = field(init=False)  # on its node
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.engine_name, self.rank = engine_and_rank(self.offer.name)

    @property
    def name(self) -> str:
        """Its name on its node."""
        return self.offer.name

    @property
    def full_name(self) -> str:
        """Its name in the cluster."""
        return f"{self.node}/{self.offer.name}"

    @property
    def model(self) -> str:
        """The model that it serves."""
        return self.offer.model

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""
        return self.offer.leg

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""
        return None if self.offer.engine is None else self.offer.engine.bootstrap

    @property
    def ranks(self) -> int:
        """The number of ranks of its engine, of which it is one."""
        return 1 if self.offer.engine is None else self.offer.engine.data_parallel

    @property
    def info(self) -> EngineInfo | None:
        """The info of its engine, as its node announced it last; None if it was never up."""
        return self.offer.engine

    @property
    def load(self) -> Load:
        """Its load: the requests of this node, and those of others as its node announced them last."""
        offer = self.offer
        busy, tokens = self.busy + offer.running + offer.waiting, self.tokens + offer.tokens
        kv_tokens_max, page_size = _kv_memory(offer.engine)
        name, bounds, queued = self.full_name, _prefill_bounds(offer), self.pending.tokens + self.queued_by_others
        ours = self.busy, self.pending.prompts, *self.directory.routers, 0, queued, page_size
        return Load(
            *(name, busy, offer.slots, tokens, tokens, kv_tokens_max, self.pending.tokens, *bounds, self.leg, *ours)
        )

    def replace_offer(self, offer: Offer) -> None:
        """Replace its offer, but keep the load."""
        last = self.offer
        self.offer = evolve(offer, running=last.running, waiting=last.waiting, tokens=last.tokens)

    def merge_load(self, load: OfferLoad) -> None:
        """Replace the load of other nodes' requests, as its node announces it."""
        running = min(load.requests, self.offer.slots)
        self.offer = evolve(self.offer, running=running, waiting=load.requests - running, tokens=load.tokens)
        self.queued_by_others = load.queued

    @overload
    def ask(self, request: Generate, credit: int) -> AbstractAsyncContextManager[Replies]: ...

    @overload
    def ask(self, request: Encode, credit: int) -> AbstractAsyncContextManager[EncodedReplies]: ...

    def ask(self, request: Work, credit: int) -> AbstractAsyncContextManager[AnyReplies]:
        """Ask over the link, waiting while it carries as many streams as it may; raises `LinkLost` if it is down."""
        return self._ask(request, credit)

    @asynccontextmanager
    async def _ask(self, request: Work, credit: int) -> AsyncIterator[AnyReplies]:
        link, request = self._link(), _of_rank(request, self.rank)
        first, tokens = _tokens(request, self.leg)
        self.pending.add(request.id, first)
        self._count(1, tokens)
        try:
            async with link.ask(request, credit, self.engine_name) as replies:
                yield cast("AnyReplies", replies)  # by the row of the request, which the link has checked
        finally:
            self.pending.discard(request.id)
            self._count(-1, -tokens)

    async def call(self, request: Message) -> Message | None:
        """Ask for anything else that its node serves under its name, and return the result."""
        async with self.watch(request, 0) as answer:
            return await answer.result()

    def watch(self, request: Message, credit: int) -> AbstractAsyncContextManager[Answer[Message, Message]]:
        """Ask for a stream that its node serves under its name; raises `LinkLost` if there is no link to it."""
        return self._link().ask(request, credit, self.engine_name)

    def begun(self, request_id: str) -> None:
        """Record that the first token of a request has come, so that its prompt is no longer pending."""
        if self.pending.discard(request_id):
            self.directory.prefill_done(self)

    def _link(self) -> Link:
        if self.link is None:
            raise LinkLost(f"there is no link to node {self.node}")
        return self.link

    def _count(self, requests: int, tokens: int) -> None:
        self.busy += requests
        self.tokens += tokens
        self.directory.load_changed(self, None)


AnyWorker: TypeAlias = LocalWorker | RemoteWorker
