"""One step of a simulated engine, and the events that a call of its scheduler returns."""

from __future__ import annotations

from attrs import Factory, frozen

from actors.engines.simulated.held_request import HeldRequest
from protocol.errors import RequestError
from protocol.messages.generation import Finished, Logprob, Started, Tokens


@frozen
class BatchUpdate:
    """The events since the last update, by request id; `emitted`, `tokens` and `logprobs` are parallel.

    `begun` has the replies before the tokens: the beginning of an answer, or of another version of the weights.
    """

    begun: list[tuple[str, Started | Tokens]] = Factory(list)
    emitted: list[str] = Factory(list)
    tokens: list[int] = Factory(list)
    logprobs: list[Logprob | None] = Factory(list)
    ended: list[tuple[str, Finished]] = Factory(list)
    failed: list[tuple[str, RequestError]] = Factory(list)


@frozen
class BatchStep:
    """One step in computation, and the requests in it; `pieces` are chunks of prompts with their tokens."""

    began_at: float
    planned_at: float  # a request submitted in the same instant still joins
    ends_at: float
    decoding: list[HeldRequest]
    pieces: list[tuple[HeldRequest, int]]
