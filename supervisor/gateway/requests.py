"""What every door does with a valid request: admit it, ask the model's processor, measure, log how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf

import trio
from attrs import define, field, frozen

from actors.kit.calls import Askable
from actors.processor import TextReply, TextRequest, TextResult
from protocol.dialects.http import Model
from protocol.errors import (
    AskerLeft,
    BadRequest,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    Overloaded,
    RequestError,
    SlowClient,
)
from protocol.messages import FinishReason, Started, Usage
from protocol.text_messages import Accepted, Answered, ChoiceEnded, Respond, Text
from protocol.trace import Trace, fields
from supervisor.gateway.access_log import AccessLog
from supervisor.gateway.keys import Key
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

DROPPED = frozenset({"backlog", "stalled"})  # why a client was dropped that has not left
NO_MEMORY = "the server has no memory left for this request"
CUT = "cut"  # the outcome of an answer that was whole here, and of which the client did not get all


@frozen
class ServedModel:
    """One model that can be asked for by name."""

    model: Callable[[], Model]  # what is known of it by now
    ask: Askable[TextRequest, TextReply, TextResult]
    total_max: Callable[[], int]  # tokens that a prompt and its answer can have, 0 while no engine has been ready


@frozen
class Ended:
    """How an answer ended here, whatever the client has of it."""

    outcome: str
    error: RequestError | None
    took_s: float


@define(eq=False)
class RequestRecord:
    """What one request has come to so far, for its log line, its metrics, and its usage if it is cut short."""

    request_id: str
    model: str
    api: str
    asked_at: float
    key: Key | None = None  # None: nobody has presented one
    what: str = ""  # the method and the path, or the type of the event
    trace: Trace | None = None
    admitted_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_at: float | None = None
    last_at: float | None = None
    reason: FinishReason | None = None  # once the answer is whole
    aborted_by: RequestError | None = None
    settles: bool = True  # it is told of as soon as it has ended; else when the client has it, by `settle`
    ended: Ended | None = None  # once it has ended
    sent_bytes: int = 0  # of its answer
    held: MemoryReservation | None = None  # the memory of an answer that is kept until it is whole
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    @property
    def usage(self) -> Usage:
        """The usage of an answer that has not ended."""
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)

    def raise_if_aborted(self) -> None:
        """Raise what has ended the answer early, if something has."""
        if self.scope.cancelled_caught and self.aborted_by is not None:
            raise self.aborted_by

    def after(self, at: float | None) -> float | None:
        """Return how many seconds after the question something was, None if it never was."""
        return None if at is None else round(at - self.asked_at, 4)


@define(eq=False)
class RequestRunner:
    """Asks on behalf of clients."""

    served: Mapping[str, ServedModel]
    metrics: Metrics
    first_token_s: float  # from the question on, whatever it waits for
    total_s: float  # the same
    access: AccessLog = field()
    _running: set[RequestRecord] = field(factory=set)

    @access.default
    def _access(self) -> AccessLog:
        return AccessLog(self.metrics)

    @property
    def running(self) -> int:
        """How many requests are being answered, or wait for that."""
        return len(self._running)

    def find(self, model: str) -> ServedModel:
        """Return the model of that name; raises `ModelNotFound`."""
        if (served := self.served.get(model)) is None:
            names = ", ".join(sorted(self.served))
            raise ModelNotFound(f"no model {model!r} is served here; there is {names}", param="model")
        return served

    def find_or_only(self, model: str | None) -> ServedModel:
        """Return the model of that name, without a name the only one; raises `ModelNotFound` or `BadRequest`."""
        if model is None and len(self.served) > 1:
            names = ", ".join(sorted(self.served))
            raise BadRequest(f"several models are served here: {names}; name one", param="model")
        return self.find(next(iter(self.served), "") if model is None else model)

    @contextmanager
    def counting(self, counted: RequestRecord) -> Iterator[None]:
        """Count and log how the request ends that the body answers; while it runs, `abort` can end it.

        A bug in the body ends it in `InternalError`.
        """
        outcome, error = AskerLeft.code, None
        self._running.add(counted)
        try:
            with counted.scope:
                yield
            counted.raise_if_aborted()
            if counted.reason is not None:
                outcome = counted.reason.value
        except RequestError as raised:
            outcome, error = raised.code, raised
            raise
        except trio.BrokenResourceError:
            raise
        except Exception as bug:
            error = internal_error(bug, counted.request_id, counted.trace)
            outcome = error.code
            raise error from bug
        finally:
            self._running.discard(counted)
            self._ended(counted, outcome, error)

    async def answer(
        self, request: Respond, served: ServedModel, counted: RequestRecord, into: Callable[[TextReply], None]
    ) -> Answered:
        """Relay one answer into `into`, which runs in the turn of whoever puts a reply.

        No answer has more tokens than the `total_max` of its request, whatever engines come and go meanwhile. Raises
        the `RequestError` that ended the answer, or what `into` raised.
        """

        def pass_on(reply: TextReply) -> None:
            self._count(counted, reply)
            into(reply)

        def patience() -> float:
            return counted.asked_at + self.first_token_s if counted.first_at is None else inf

        with trio.move_on_at(counted.asked_at + self.total_s) as total:
            async with served.ask.ask(request, (request.total_max or 0) * request.choices) as answer:
                answered = await answer.relay(pass_on, patience)
        if total.cancelled_caught:
            raise DeadlineExceeded(f"the answer took longer than {self.total_s} s")
        if answered is None:
            raise DeadlineExceeded(f"there was no token within {self.first_token_s} s")
        assert isinstance(answered, Answered)  # nothing else answers a Respond
        counted.completion_tokens = answered.usage.completion_tokens
        counted.cached_tokens = answered.usage.cached_tokens  # `Started` told those of the first prompt alone
        return answered

    def abort(self, counted: RequestRecord, why: RequestError) -> None:
        """End one answer early; whoever waits for it is raised `why`."""
        if counted.aborted_by is None:
            counted.aborted_by = why
            counted.scope.cancel(reason=why.code)

    def abort_all(self, why: RequestError) -> int:
        """End every answer early, and return how many there were."""
        running = tuple(self._running)
        for counted in running:
            self.abort(counted, why)
        return len(running)

    def _count(self, counted: RequestRecord, reply: TextReply) -> None:
        now = trio.current_time()
        match reply:
            case Text() if reply.tokens:
                if counted.last_at is not None:
                    first = counted.completion_tokens == 0  # that one came with `Started`, and has no gap before it
                    self.metrics.token_gap(counted.model, now - counted.last_at, reply.tokens - first)
                counted.last_at = now
                counted.completion_tokens += reply.tokens
            case Text():
                pass  # an echo of the prompt
            case Started():
                counted.first_at = counted.last_at = now
                counted.cached_tokens = reply.cached_tokens
                self.metrics.first_token(counted.model, now - counted.asked_at)
            case ChoiceEnded():
                counted.reason = reply.reason
            case Accepted():
                counted.prompt_tokens = reply.prompt_tokens

    def _ended(self, counted: RequestRecord, outcome: str, error: RequestError | None) -> None:
        counted.ended = Ended(outcome, error, trio.current_time() - counted.asked_at)
        if error is not None:
            self.access.mark_logged(error)
        if counted.settles:
            self.settle(counted)

    def settle(self, counted: RequestRecord, cut: str | None = None) -> None:
        """Count and log a request that has ended, and whose client has the answer, or all of it that it will get.

        `cut` says why the client did not get all of it; of an answer that was not whole here that is no news.
        """
        if (ended := counted.ended) is None:
            return
        outcome, error = ended.outcome, ended.error
        if cut is not None and counted.reason is not None and outcome == counted.reason.value:
            outcome = CUT
            self.metrics.response_incomplete(counted.api, cut)
        elif outcome == AskerLeft.code and cut in DROPPED:  # it was this end that ended the connection
            outcome, error = SlowClient.code, SlowClient("the client did not read its answer")
        self.metrics.request_ended(counted.model, counted.api, outcome, ended.took_s, counted.usage)
        line: dict[str, object] = {
            "request_id": counted.request_id,
            **fields(counted.trace),
            "key": "-" if counted.key is None else counted.key.name,
            "api": counted.api,
            "request": counted.what,
            "status": _status(outcome, error),
            "model": counted.model,
            "outcome": outcome,
            **({"cut": cut} if outcome == CUT else {}),
            "response_bytes": counted.sent_bytes,
            "duration_s": round(ended.took_s, 4),
            "waited_s": counted.after(counted.admitted_at),
            "first_token_s": counted.after(counted.first_at),
            "prompt_tokens": counted.prompt_tokens,
            "cached_tokens": counted.cached_tokens,
            "completion_tokens": counted.completion_tokens,
        }
        self.access.log_ended(line, error, admitted=counted.admitted_at is not None)


def internal_error(bug: Exception, request_id: str, trace: Trace | None) -> RequestError:
    """Log a bug with where it rose, and return what its client may know of it; to have no memory left is none."""
    if isinstance(bug, MemoryError):
        log.error("no memory was left for a request", extra={"request_id": request_id, **fields(trace)})
        return Overloaded(NO_MEMORY)
    log.error("a bug failed a request", exc_info=bug, extra={"request_id": request_id, **fields(trace)})
    return InternalError("the server made a mistake; its log has the details")


def _status(outcome: str, error: RequestError | None) -> int:
    if error is not None:
        return error.http_status
    return {AskerLeft.code: AskerLeft.http_status, InternalError.code: InternalError.http_status}.get(outcome, 200)
