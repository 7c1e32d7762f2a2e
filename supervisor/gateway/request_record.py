"""The record of one request: its times, its tokens and its end, from which its line in the access log is made."""

from __future__ import annotations

import trio
from attrs import define, field, frozen

from protocol.dialects.targets import NO_TARGETS, Targets
from protocol.errors import AskerLeft, InternalError, RequestError
from protocol.messages.generation import FinishReason, RouteTaken, Usage
from protocol.messages.text import AnswerPiece
from protocol.trace import Trace, log_fields
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.telemetry.registry import Buckets


@frozen
class ResponseEnd:
    """The end of a response on this side, however much of it the client got."""

    outcome: str
    error: RequestError | None
    duration_s: float


@define(eq=False)
class RequestRecord:
    """One request: its times, by `trio.current_time`, its tokens, and how it ended."""

    request_id: str
    model: str
    api: str
    received_at: float
    key: ClientKey | None = None  # None: the request needs none
    request_line: str = ""  # the method and the path, or the type of a WebSocket event
    trace: Trace | None = None
    targets: Targets = NO_TARGETS  # that its headers name, or those of its connection
    admitted_at: float | None = None
    prepared_at: float | None = None
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, that were not tokenised again
    cached_tokens: int = 0
    route_cached_tokens: int = 0  # of the prompt whose route is known; a request may have several
    completion_tokens: int = 0
    items: int = 0  # texts whose vectors or scores are computed; 0: it is answered in text
    first_at: float | None = None
    last_at: float | None = None
    route: RouteTaken | None = None  # of the first choice
    reason: FinishReason | None = None  # of the choice that ended last
    aborted_by: RequestError | None = None
    settles: bool = True  # it is logged as soon as it has ended; otherwise by the caller of `settle`
    ended: ResponseEnd | None = None  # once it has ended
    sent_bytes: int = 0  # of its response
    memory: MemoryReservation | None = None  # of a response that is kept until it is complete
    base: str = ""  # the model without its adapter; empty: it has none
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    @property
    def counted_model(self) -> str:
        """The model of its metrics: adapters come and go, so they have no series of their own."""
        return self.base or self.model

    @property
    def usage(self) -> Usage:
        """The tokens that have been counted so far."""
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)

    def seconds_to(self, time: float | None) -> float | None:
        """Return the seconds from the arrival of the request to a time, None if that has not come."""
        return None if time is None else round(time - self.received_at, 4)

    def line(
        self, outcome: str, error: RequestError | None, *, duration_s: float, cut: str | None
    ) -> dict[str, object]:
        """Return the fields of its line in the access log; `cut` is why the client got a part of the response alone."""
        return {
            "request_id": self.request_id,
            **log_fields(self.trace),
            "key": "-" if self.key is None else self.key.name,
            "api": self.api,
            "request": self.request_line,
            "status": _status(outcome, error),
            "model": self.model,
            "outcome": outcome,
            **({} if error is None else error.log_fields),
            **({} if cut is None else {"cut": cut}),
            "response_bytes": self.sent_bytes,
            "duration_s": round(duration_s, 4),
            "waited_s": self.seconds_to(self.admitted_at),
            "first_token_s": self.seconds_to(self.first_at),
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "cached_tokens": self.cached_tokens,
            **_route_fields(self.route),
            **({"items": self.items} if self.items else {}),
            "completion_tokens": self.completion_tokens,
        }


def count_text(record: RequestRecord, text: AnswerPiece, gaps: Buckets, now: float) -> None:
    """Count the tokens of a piece of an answer that has come now, and the time since the one before."""
    tokens = text.tokens
    if not tokens:
        # The text is an echo of the prompt.
        return
    last_at = record.last_at
    if last_at is not None:
        # The first token came with `Started`, and has no gap before it.
        counted = tokens if record.completion_tokens else tokens - 1
        if counted:
            gaps.observe((now - last_at) / counted, counted)
    record.last_at = now
    record.completion_tokens += tokens


def _route_fields(route: RouteTaken | None) -> dict[str, object]:
    if route is None:
        return {}
    score = {} if route.score is None else {"route_score": round(route.score, 1)}
    return {"worker": route.workers, "overlap_tokens": route.overlap, **score}


def _status(outcome: str, error: RequestError | None) -> int:
    if error is not None:
        return error.http_status
    return {AskerLeft.code: AskerLeft.http_status, InternalError.code: InternalError.http_status}.get(outcome, 200)
