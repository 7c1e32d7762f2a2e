"""The ports of a router: workers to ask, their pool, and an observer of requests.

A router is independent of nodes and links: local and remote workers are the same to it, and so are a test's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from actors.kit.calls import Answer, Askable
from actors.routing.load import Load
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.media import Encode, Encoded
from protocol.pairing import Pairing

Req_contra = TypeVar("Req_contra", contravariant=True)
Res = TypeVar("Res")

Replies: TypeAlias = Answer[Started | Tokens, Finished]


class Worker(Askable[Generate, Started | Tokens, Finished], Protocol):
    """One worker of a model, of any node; its load counts a request from the turn in which it is asked.

    It is an engine, or one rank of it.
    """

    @property
    def full_name(self) -> str:
        """Its name, unique in its pool, without the cost of making its load."""

    @property
    def load(self) -> Load:
        """Its load at this moment."""

    @property
    def leg(self) -> Leg:
        """The part of a request that it computes."""

    @property
    def info(self) -> EngineInfo | None:
        """The info of its engine, None while it is not known."""

    def begun(self, request_id: str) -> None:
        """The first token of a request is there, so its prompt is not pending any more."""


class Ranking(Protocol):
    """Workers in the order in which a policy prefers them."""

    def __len__(self) -> int:
        """The number of workers."""

    def __iter__(self) -> Iterator[Worker]:
        """Yield the preferred worker first."""

    def get(self, name: str) -> Worker | None:
        """Return the worker of a name, None if it is not among these."""


class Pool(Protocol):
    """The workers of one model."""

    def workers(self) -> Sequence[Worker]:
        """Return the workers that can be asked now."""

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs, by name, of these workers and of the workers expected soon."""

    def pairing(self) -> Pairing:
        """Return the pairs among the prefills and decodes that can be asked now."""

    def lacking(self, adapter: Adapter) -> Collection[str] | None:
        """Return the names of the workers without an adapter, None if no worker has it."""

    def weights(self) -> str | None:
        """Return the digest of the weights of the workers that can be asked now, None if it is not known."""

    async def wait_changed(self) -> None:
        """Wait until a worker has come, gone, or become less busy, or until `wake`."""

    def wake(self) -> None:
        """Wake all tasks in `wait_changed`: a reservation was released."""


class RoutedAnswerer(Askable[Req_contra, Res, Res], Protocol[Req_contra, Res]):
    """A worker that answers by one result; its load counts a request from the turn in which it is asked."""

    @property
    def full_name(self) -> str:
        """Its name, which is unique in its pool."""

    @property
    def load(self) -> Load:
        """Its load at this moment."""


RoutedEncoder: TypeAlias = RoutedAnswerer[Encode, Encoded]
RoutedEmbedder: TypeAlias = RoutedAnswerer[Embed, Vectors]


class EncoderPool(Protocol):
    """The encoders of one model."""

    def encoders(self) -> Sequence[RoutedEncoder]:
        """Return the encoders that can be asked now."""

    async def wait_changed(self) -> None:
        """Wait until an encoder has come, gone, or become less busy."""


class EmbedderPool(Protocol):
    """The embedders of one model."""

    def embedders(self) -> Sequence[RoutedEmbedder]:
        """Return the embedders that can be asked now."""

    async def wait_changed(self) -> None:
        """Wait until an embedder has come, gone, or become less busy."""


class RoutingObserver:
    """Receives events of calls and workers, never of single tokens; this one ignores them."""

    def call_ended(self, worker: str, outcome: str) -> None:
        """The answer of a worker has ended; `outcome` is `ended`, `left`, or an error's code."""

    def diverted(self, pool: str, actual: str) -> None:
        """A leg is asked in another pool than it is mapped to; `actual` is empty for a worker that is in none."""

    def chosen(self, seconds: float) -> None:
        """The choice of workers for a request took so long."""

    def answer_begun(self, overlap: int | None, cached: int, blind: bool) -> None:
        """A first token has come: so many tokens of the prompt were expected in the cache, and so many were there.

        None: its policy predicts nothing. The choice was `blind` if some worker had not reported its blocks yet.
        """

    def call_resumed(self, code: str, sent: int) -> None:
        """A request goes on elsewhere, with the code of its worker's loss, and the number of tokens sent before."""

    def call_not_resumed(self, code: str) -> None:
        """A request ends with the error of its worker's loss, since no other worker could go on exactly."""

    def worker_ejected(self, worker: str, code: str) -> None:
        """A worker, or a pair, is ejected because it keeps failing; `code` is that of its last error."""

    def readmitted(self, worker: str) -> None:
        """A worker, or a pair, is readmitted."""
