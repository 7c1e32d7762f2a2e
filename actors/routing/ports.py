"""What a router needs of the world: workers to ask, a pool that knows them, and a watch that hears how it went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from actors.kit.calls import Answer, Askable
from actors.routing.load import Load
from protocol.cluster import Leg
from protocol.messages import Finished, Generate, Started, Tokens

Replies: TypeAlias = Answer[Started | Tokens, Finished]


class Worker(Askable[Generate, Started | Tokens, Finished], Protocol):
    """One worker of a model, wherever it is; from the turn in which it is asked, the request counts in its load."""

    @property
    def load(self) -> Load:
        """How busy it is; no other worker of its pool has its name."""

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""

    def begun(self, request_id: str) -> None:
        """Hear that the first token of a request is there, so that its prompt is pending no more."""


class Ranking(Protocol):
    """Workers in the order in which a policy prefers them."""

    def __len__(self) -> int:
        """How many there are."""

    def __iter__(self) -> Iterator[Worker]:
        """Yield the preferred first."""


class Pool(Protocol):
    """The workers of one model."""

    def workers(self) -> Sequence[Worker]:
        """Return those that can be asked now."""

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs of these and of those that should soon be among them, by the names of their loads."""

    def weights(self) -> str | None:
        """Return which weights those have that can be asked now, None if that is not known."""

    async def wait_changed(self) -> None:
        """Wait until a worker has come, gone, or become less busy, or until `wake`."""

    def wake(self) -> None:
        """End the waiting of all in `wait_changed`: a place that was kept at a worker is kept no longer."""


class RoutingObserver:
    """Who hears, once a call and never once a token, what becomes of requests; this one forgets it."""

    def called(self, worker: str, outcome: str) -> None:
        """Hear that a worker's answer is over: `ended`, `left`, or an error's code."""

    def call_resumed(self, code: str, sent: int) -> None:
        """Hear that a request goes on elsewhere: what its worker was lost with, after how many tokens."""

    def call_not_resumed(self, code: str) -> None:
        """Hear that a request ends with what its worker was lost with, since nobody else could go on exactly."""

    def worker_ejected(self, worker: str, code: str) -> None:
        """Hear that a worker, or a pair, is set aside because it keeps failing, and with what it failed last."""

    def let_in(self, worker: str) -> None:
        """Hear that it is well again."""
