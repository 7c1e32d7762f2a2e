"""One engine, encoder or embedder of a node and the inbox of its requests, from which a kind makes a child."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias, TypeVar

from attrs import Factory, field, frozen

from actors.engines.embedding.port import Embedder
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.slots.slots import Slots
from actors.kit.calls import Address
from actors.kit.priority_inbox import PriorityInbox, priority_inbox
from actors.text.model import TextModel
from protocol.cost import encoding_tokens, generation_tokens
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.media import Encode, Encoded
from protocol.model_folder import Digest
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.model_weights import NewestWeights
from supervisor.config.schema import EngineSection
from supervisor.engines.engine_role import EngineRole
from supervisor.supervision.registration import Registration

RequestInbox: TypeAlias = PriorityInbox[Generate, Started | Tokens, Finished]
"""The requests that wait for one engine, or for a router: by priority, and fair between their owners."""


EncodeInbox: TypeAlias = PriorityInbox[Encode, Encoded, Encoded]
"""The items that wait for one encoder, in the same order."""

EmbedInbox: TypeAlias = PriorityInbox[Embed, Vectors, Vectors]
"""The requests that wait for one embedder, in the same order."""


def request_inbox(
    size: int, group: Callable[[Generate], Hashable] = lambda _: ()
) -> tuple[Address[Generate, Started | Tokens, Finished], RequestInbox]:
    """Return the address for requests, and the inbox in which at most `size` of them wait.

    Those of one `group` wait for the same, and hold up no others.
    """
    return priority_inbox(
        size, lambda request: request.priority, lambda request: request.owner, generation_tokens, group
    )


def encode_inbox(size: int) -> tuple[Address[Encode, Encoded, Encoded], EncodeInbox]:
    """Return the address for items, and the inbox in which at most `size` of them wait."""
    return priority_inbox(size, lambda request: request.priority, lambda request: request.owner, encoding_tokens)


def embed_inbox(size: int) -> tuple[Address[Embed, Vectors, Vectors], EmbedInbox]:
    """Return the address for requests of vectors, and the inbox in which at most `size` of them wait."""
    return priority_inbox(
        size, lambda request: request.priority, lambda request: request.owner, lambda request: request.tokens
    )


E = TypeVar("E")
InboxT = TypeVar("InboxT")


@frozen
class _Local(Generic[E, InboxT]):
    """The parts that engines, encoders and embedders of a node have in common."""

    name: str
    configured: EngineSection  # its section in the file
    registration: Registration[E]  # where it is published while it can be asked
    inbox: InboxT
    on_up: Callable[[], None]  # lets requests that wait at its siblings move to it
    on_down: Callable[[], None]  # lets requests that wait in its inbox be asked elsewhere
    text: TextModel | None = None  # of an encoder, and of an engine whose section `reads_text`
    digest: Digest = ()  # of the model's folder, as this node has read it

    @property
    def section(self) -> EngineSection:
        """Its section, as its present life has it."""
        return self.configured


def _ignore(_: str) -> None:
    pass


@frozen
class LocalEngine(_Local[Engine, RequestInbox]):
    """One engine that this node is to run: its role, its inbox, and where it is published.

    `on_begun` has a function for each rank, called with the id of each request with a computed prompt.
    """

    slots: Registration[tuple[Slots, ...]] = field(factory=Registration)  # of its present life, by rank
    life: Registration[EngineLife] = field(factory=Registration)  # its present one, for operations
    newest: NewestWeights = field(factory=NewestWeights)  # of its model
    on_begun: tuple[Callable[[str], None], ...] = (_ignore,)
    shares_prefixes: bool = False  # while it computes both legs, a prompt waits while another computes its beginning
    role: EngineRole = field(default=Factory(lambda self: EngineRole(self.configured), takes_self=True))

    @property
    def section(self) -> EngineSection:
        """Its section, as its present life has it."""
        return self.role.section


@frozen
class LocalEncoder(_Local[Encoder, EncodeInbox]):
    """One encoder that this node is to run: its section, its inbox, and where it is published."""


@frozen
class LocalEmbedder(_Local[Embedder, EmbedInbox]):
    """One embedder that this node is to run: its section, its inbox, and where it is published."""
