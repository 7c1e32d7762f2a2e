"""A worker of the cluster: an engine, or one rank of an engine, of any node, as routers ask it.

A router asks all workers alike. What a worker of this node and one of another have in common is here: the names, and
the ledger of the requests in flight (`in_flight.py`), from which the load follows. An engine with several data-parallel
ranks is as many workers, which share its inbox and its life. Each has a load of its own, and `Generate.rank` names the
rank that a request is for.

`ask` is for what occupies the worker: an `Encode` if that is an encoder, an `Embed` if it is an embedder, else a
`Generate`. `call` reaches everything else that the worker's node serves under its name (its load, its prefix cache, a
grammar check): any message with a row in the message table.

A worker does not import the directory. It reports to a `SiblingDirectory`, and asks it whether others could serve, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias, cast, overload

from attrs import define, evolve, field

from actors.kit.calls import Answer
from actors.routing.load import Load
from protocol.cost import encoding_tokens, kv_tokens
from protocol.messages.cluster import Leg, Offer, engine_and_rank
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded
from supervisor.cluster.in_flight import InFlight
from supervisor.cluster.model_weights import NewestWeights

Work: TypeAlias = Generate | Encode | Embed
"""A request that occupies a worker; an encoder gets the second, an embedder the third, all others the first."""

Replies: TypeAlias = Answer[Started | Tokens, Finished]
EncodedReplies: TypeAlias = Answer[Encoded, Encoded]
"""The answer to an `Encode`: no replies, then its result."""

VectorsReplies: TypeAlias = Answer[Vectors, Vectors]
"""The answer to an `Embed`: no replies, then its result."""

AnyReplies: TypeAlias = Replies | EncodedReplies | VectorsReplies
Ask: TypeAlias = Callable[[Message, int], AbstractAsyncContextManager[Answer[Message, Message]]]
"""A function that passes a request on, with so much credit."""


class SiblingDirectory(Protocol):
    """The part of the directory that a worker needs: the other workers, and the report of its own load."""

    def has_sibling(self, worker: ClusterWorker) -> bool:
        """Whether another worker of the same model and leg can be asked now, or one that computes both legs."""

    def load_changed(self, worker: ClusterWorker, asker: str | None) -> None:
        """Record that a worker's load has changed; `asker` is the other node whose request changed it, if any."""

    def newest_weights(self, model: str) -> NewestWeights:
        """Return the newest weights that an engine of a model has had."""

    @property
    def routers(self) -> tuple[int, int]:
        """The number of nodes that route, this one included, and its place among them by name."""


def _tokens(request: Work, leg: Leg) -> tuple[int, int]:
    """Return the tokens of a request: the computed ones of a leg before its first reply, and the most to hold.

    Cached tokens are held, too, while the request runs; common tokens count for each request.
    """
    if isinstance(request, Encode):
        return encoding_tokens(request), encoding_tokens(request)
    if isinstance(request, Embed):
        return request.tokens, request.tokens
    return request.uncached_tokens, kv_tokens(request, leg, 0)


def _of_rank(request: Work, rank: int) -> Work:
    """Return a request as one for a rank."""
    return evolve(request, rank=rank) if isinstance(request, Generate) and request.rank != rank else request


@define(eq=False, kw_only=True)
class ClusterWorker(ABC):
    """A worker of any node: its names, the ledger of its requests, and how they are asked."""

    node: str
    directory: SiblingDirectory
    in_flight: InFlight = field(factory=InFlight)
    engine_name: str = field(init=False)  # on its node
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.engine_name, self.rank = engine_and_rank(self.stated.name)

    @property
    @abstractmethod
    def stated(self) -> Offer:
        """An offer of it, in which the numbers of requests and tokens may be out of date."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo | None:
        """The info of its engine as it was last, None if that was never up."""

    @property
    @abstractmethod
    def offer(self) -> Offer:
        """Its offer with its load, as far as this node knows it."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks of its engine, of which it is one."""

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether its engine accepts requests, as far as this node knows."""

    @property
    def name(self) -> str:
        """Its name on its node."""
        return self.stated.name

    @property
    def full_name(self) -> str:
        """Its name in the cluster."""
        return f"{self.node}/{self.stated.name}"

    @property
    def model(self) -> str:
        """The model that it serves."""
        return self.stated.model

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""
        return self.stated.leg

    @property
    def load(self) -> Load:
        """Its load: the requests of this node, and those of others as far as this node knows them."""
        return self.in_flight.load(self.full_name, self.stated, self.info, self.directory.routers)

    @overload
    def ask(self, request: Generate, credit: int) -> AbstractAsyncContextManager[Replies]: ...

    @overload
    def ask(self, request: Encode, credit: int) -> AbstractAsyncContextManager[EncodedReplies]: ...

    @overload
    def ask(self, request: Embed, credit: int) -> AbstractAsyncContextManager[VectorsReplies]: ...

    def ask(self, request: Work, credit: int) -> AbstractAsyncContextManager[AnyReplies]:
        """Ask for this node, waiting while the worker accepts nothing; leaving cancels the request.

        Raises `NotReady` or `LinkLost` if it cannot be asked.
        """
        return self.ask_for(None, request, credit)

    @asynccontextmanager
    async def ask_for(self, asker: str | None, request: Work, credit: int) -> AsyncIterator[AnyReplies]:
        """Ask for another node, or None for this one, as `ask` does."""
        ask, request = self._ask(), _of_rank(request, self.rank)
        prompt_tokens, tokens = _tokens(request, self.leg)
        self.in_flight.add(asker, request.id, prompt_tokens, tokens)
        self.directory.load_changed(self, asker)
        try:
            async with ask(request, credit) as replies:
                yield cast("AnyReplies", replies)  # by the row of the request, which a link has checked
        finally:
            self.in_flight.remove(asker, request.id, tokens)
            self.directory.load_changed(self, asker)

    @abstractmethod
    def _ask(self) -> Ask:
        """Return the function that passes a request on; raises `NotReady` or `LinkLost` if there is none now."""

    async def call(self, request: Message) -> Message | None:
        """Ask for anything else that its node serves under its name, and return the result."""
        async with self.watch(request, 0) as answer:
            return await answer.result()

    @abstractmethod
    def watch(self, request: Message, credit: int) -> AbstractAsyncContextManager[Answer[Message, Message]]:
        """Ask for a stream that its node serves under its name; raises `NotReady` or `LinkLost` if it cannot."""

    def begun(self, request_id: str) -> None:
        """Record the first token of this node's request: its prompt is no longer pending."""
        if self.in_flight.begun(request_id):
            self.directory.load_changed(self, None)
