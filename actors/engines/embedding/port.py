"""The port of an embedder: an engine that computes vectors of texts, or scores of pairs, as the actors see it.

An embedder computes prompts and no answers. A request to it is a part of a client's: all of its items are computed, or
it fails as a whole. The engine makes its own batches over all requests that it has, so a node gives it no more requests
than it has slots, and keeps the rest where keys take turns. An embedder decides nothing about retries or deadlines;
these are the actor's.

`tests/contracts/embedder.py` checks every kind, beyond the types: a vector depends on its item alone, not on the items
beside it or on other requests; and a request that was left holds nothing, at any moment.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from actors.kit.calls import Answer
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.engine import EngineInfo, EngineLoad

VectorsAnswer: TypeAlias = Answer[Vectors, Vectors]
"""The answer to one request: no replies, then its result."""


class Embedder(Protocol):
    """One embedder, in this process or another.

    The submitter chooses the id of a request, which is valid from `submit` on. An answer that is over has released what
    its request held.
    """

    @property
    def info(self) -> EngineInfo:
        """The embedder's kind, version and limits; its `embedding` has the properties of its vectors.

        `request_tokens_max` limits the tokens of one item, and `running_max` the requests at once.
        """

    def submit(self, request: Embed) -> VectorsAnswer:
        """Start a request, or let it wait inside the engine; never blocks.

        Raises the errors of `check_embed` (`embed_check.py`), `Overloaded` if there is no place for it, `TooLarge` if
        it cannot be sent to the engine's process, and `EngineLost` if the engine died. At least one request may wait
        when `running_max` are computed.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request: at once, at any moment from `submit` on, any number of times, also after its end."""

    async def wait_released(self, request_id: str) -> None:
        """Wait until the engine itself reports the release of all items of a request."""

    async def wait_lost(self) -> None:
        """Wait until the engine is lost, for any reason."""

    async def load(self) -> EngineLoad:
        """Return the engine's own counts of running and waiting items, and of its KV tokens in use."""
