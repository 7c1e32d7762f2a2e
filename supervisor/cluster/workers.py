"""The workers of the two places: of this node, in the inbox of an engine, and of another node, at the end of a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeAlias, cast

from attrs import define, evolve, field

from actors.engines.embedding.port import Embedder
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.kit.calls import Address, Answer, Askable
from actors.kit.priority_inbox import PriorityInbox
from protocol.errors import ActorLost, LinkLost, NotReady
from protocol.messages.cluster import COUNT_MAX, InFlightCounts, Offer
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded
from protocol.weights_record import WeightsRecord
from supervisor.cluster.cluster_worker import Ask, ClusterWorker
from supervisor.links.link import Link
from supervisor.links.serving import Service
from supervisor.supervision.registration import Registration

WorkAddress: TypeAlias = (
    Address[Generate, Started | Tokens, Finished] | Address[Encode, Encoded, Encoded] | Address[Embed, Vectors, Vectors]
)
WorkInbox: TypeAlias = (
    PriorityInbox[Generate, Started | Tokens, Finished]
    | PriorityInbox[Encode, Encoded, Encoded]
    | PriorityInbox[Embed, Vectors, Vectors]
)


@define(eq=False, kw_only=True)
class LocalWorker(ClusterWorker):
    """A worker of this node: an engine, or one rank of it."""

    idle_offer: Offer  # its offer while it has no request
    address: WorkAddress
    engine: Registration[Engine] | Registration[Encoder] | Registration[Embedder]
    inbox: WorkInbox
    services: Mapping[type[Message], Service] = field(factory=dict)  # under the name of its engine, for `call`
    ranks: int = 1  # of its engine, of which it is one
    weights: Callable[[], WeightsRecord] = WeightsRecord  # of its engine

    @property
    def stated(self) -> Offer:
        """Its offer while it has no request and its engine is down."""
        return self.idle_offer

    @property
    def info(self) -> EngineInfo | None:
        """The info of the latest life of its engine, None if that was never up."""
        return None if (last := self.engine.last) is None else last.info

    @property
    def is_up(self) -> bool:
        """Whether its engine is up and in service, with the weights of its model."""
        if self.engine.current is None:
            return False
        return not self.leg.generates or not self.directory.newest_weights(self.model).behind(self.weights())

    @property
    def offer(self) -> Offer:
        """Its offer at this moment."""
        return self._offer(self.in_flight.requests, self.in_flight.tokens)

    def offer_for(self, node: str) -> Offer:
        """Return its offer at this moment as it is announced to another node."""
        load = self.load_without(node)
        return self._offer(load.requests, load.tokens)

    def _offer(self, requests: int, tokens: int) -> Offer:
        slots = self.idle_offer.slots
        return evolve(
            self.idle_offer,
            up=self.is_up,
            why=self.engine.unavailable_reason,
            engine=self.info,
            running=min(requests, slots),
            waiting=max(0, requests - slots),
            tokens=min(tokens, COUNT_MAX),
            weights=self.weights(),
        )

    def load_without(self, node: str) -> InFlightCounts:
        """Return its load without the requests of one other node, which counts its own."""
        return self.in_flight.without(node, self.name)

    def _ask(self) -> Ask:
        """Return the way into its inbox, where requests wait for room.

        Raises `NotReady` if its engine is down and a sibling is not: a request that can be served elsewhere need not
        wait for a restart.
        """
        if not self.is_up and self.directory.has_sibling(self):
            raise NotReady(f"engine {self.engine_name} is starting")
        return cast("Askable[Message, Message, Message]", self.address).ask

    def watch(self, request: Message, credit: int) -> AbstractAsyncContextManager[Answer[Message, Message]]:
        """Ask for a stream that this node serves under its name; raises `NotReady` if it does not."""
        if (service := self.services.get(type(request))) is None:
            raise NotReady(f"engine {self.engine_name} serves no {type(request).__name__}")
        return service.ask(request, credit)

    def computed(self, request_id: str) -> None:
        """Record that the prompt of a request of another node has been computed."""
        if (asker := self.in_flight.computed(request_id)) is not None:
            self.directory.load_changed(self, asker)

    def reroute_queued(self) -> None:
        """Fail what waits in the inbox, if a sibling can serve it."""
        if not self.directory.has_sibling(self):
            return
        if self.engine.live is not None and not self.engine.in_service:
            self.inbox.turn_away(NotReady(f"engine {self.engine_name} {self.engine.status_text}"))
        else:
            self.inbox.turn_away(ActorLost(f"the engine {self.engine_name} is gone"))


@define(eq=False, kw_only=True)
class RemoteWorker(ClusterWorker):
    """A worker of another node: its announced offer, and this node's requests to it."""

    offer: Offer  # with the load of other nodes' requests as announced last
    link: Link | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.merge_offer(self.offer)

    @property
    def stated(self) -> Offer:
        """Its offer as announced."""
        return self.offer

    @property
    def info(self) -> EngineInfo | None:
        """The info of its engine as its node announced it last, None if that was never up."""
        return self.offer.engine

    @property
    def is_up(self) -> bool:
        """Whether its engine accepts requests, as its node announced it last."""
        return self.offer.up

    @property
    def ranks(self) -> int:
        """The number of ranks of its engine, of which it is one."""
        return 1 if self.offer.engine is None else self.offer.engine.data_parallel

    def merge_offer(self, offer: Offer) -> None:
        """Replace its offer and its load; how many prompts wait there follows with the next loads."""
        self.offer = offer
        self.in_flight.replace_others(
            InFlightCounts(name=offer.name, requests=offer.running + offer.waiting, tokens=offer.tokens)
        )

    def replace_offer(self, offer: Offer) -> None:
        """Replace its offer, but keep the load."""
        last = self.offer
        self.offer = evolve(offer, running=last.running, waiting=last.waiting, tokens=last.tokens)

    def merge_load(self, load: InFlightCounts) -> None:
        """Replace the load of other nodes' requests, as its node announces it."""
        running = min(load.requests, self.offer.slots)
        self.offer = evolve(self.offer, running=running, waiting=load.requests - running, tokens=load.tokens)
        self.in_flight.replace_others(load)

    def _ask(self) -> Ask:
        """Return the way over its link; it waits while the link is full of streams."""
        return partial(self._link().ask, to=self.engine_name)

    def watch(self, request: Message, credit: int) -> AbstractAsyncContextManager[Answer[Message, Message]]:
        """Ask for a stream that its node serves under its name; raises `LinkLost` if there is no link to it."""
        return self._link().ask(request, credit, self.engine_name)

    def _link(self) -> Link:
        if self.link is None:
            raise LinkLost(f"there is no link to node {self.node}")
        return self.link
