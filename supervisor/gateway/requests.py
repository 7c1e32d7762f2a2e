"""The answering and accounting of valid requests, whichever API they came by.

Each request has one record, from its arrival to the last byte that its client gets. The access log, the metrics and the
usage in the response are made from this record, so they cannot disagree. A request can end in two ways at once:
complete here, and incomplete for a client that did not read. So it is logged once the socket has taken its last bytes,
or it is certain that it never will.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import trio
from attrs import Factory, define, evolve, field, frozen

from actors.embedding import EmbeddingResult
from actors.engines.adapter_table import not_loaded
from actors.kit.calls import Askable
from actors.kit.fast_path import FastPath
from actors.kit.spans import Spans
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
    Unsupported,
)
from protocol.messages.adapters import ADAPTER_MARK, Adapter
from protocol.messages.embedding import EmbeddingInfo, EmbedTexts, ScoreTexts, TextScores, TextVectors
from protocol.messages.generation import FinishReason, Started
from protocol.messages.text import Accepted, Answered, AnswerPiece, CallPart, ChoiceEnded, Reasoning, Respond, Text
from protocol.trace import Trace, log_fields
from supervisor.gateway.access_log import AccessLog
from supervisor.gateway.request_record import RequestRecord, ResponseEnd, count_text
from supervisor.gateway.request_spans import record_spans
from supervisor.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

RenderedReply: TypeAlias = Accepted | Started | AnswerPiece | ChoiceEnded
"""The replies of which an API makes its answer."""

DROPPED = frozenset({"backlog", "stalled"})  # reasons for which this server ended a connection
NO_MEMORY = "the server has no memory left for this request"
CUT = "cut"  # the outcome of a response that was complete here, and of which the client got a part


@frozen
class ServedEmbeddings:
    """A model of vectors or of scores, as it is asked for these."""

    ask: Askable[EmbedTexts | ScoreTexts, EmbeddingResult, EmbeddingResult]
    info: Callable[[], EmbeddingInfo | None]  # None until the first engine is ready
    routes: str  # by which clients ask it, for a sentence

    def refuse_answer(self, model: str) -> Unsupported:
        """Return the error of a request for an answer in text."""
        return Unsupported(f"model {model} computes no answers: ask {self.routes}", param="model")

    def refuse_vectors(self, model: str) -> Unsupported:
        """Return the error of a request for vectors to a model of scores."""
        why = f"model {model} computes scores of pairs of texts, and no vectors: ask {self.routes}"
        return Unsupported(why, param="model")


@frozen
class ServedModel:
    """One model that can be asked for by name; one that computes `embeddings` computes no answers."""

    model: Callable[[], Model]  # as the API shows it at this moment
    ask: Askable[TextRequest, TextReply, TextResult]
    total_max: Callable[[], int]  # tokens that a prompt and its answer can have, 0 while no engine has been ready
    targets: frozenset[str] = frozenset()  # the fields of targets that its grids read
    adapters: Callable[[], Mapping[str, Adapter]] = dict  # its loaded adapters at this moment, by name
    adapter: Adapter | None = None  # with which it is asked
    base: str = ""  # the name of the model without the adapter
    embeddings: ServedEmbeddings | None = None

    def models(self) -> Iterator[Model]:
        """Yield the model, then each of its adapters."""
        yield self.model()
        for name in sorted(self.adapters()):
            yield self._of_adapter(name)

    def with_adapter(self, name: str) -> ServedModel:
        """Return the model with one of its adapters; raises `ModelNotFound` unless that is loaded."""
        loaded = self.adapters()
        if (adapter := loaded.get(name)) is None:
            raise ModelNotFound(f"model {self.model().id}: {not_loaded(name, loaded)}", param="model")
        return evolve(self, model=partial(self._of_adapter, name), adapter=adapter, base=self.model().id)

    def _of_adapter(self, name: str) -> Model:
        model = self.model()
        named = f"{model.id}{ADAPTER_MARK}{name}"
        return Model(named, model.created, named, model.max_model_len, model.honours_seed, parent=model.id)


@define(eq=False)
class Conversion:
    """One request about tokens, which has no record."""

    scope: trio.CancelScope
    aborted_by: RequestError | None = None


@define(eq=False)
class RequestRunner:
    """Runs requests through the processors of their models, within the deadlines that hold for all requests."""

    served: Mapping[str, ServedModel]
    metrics: Metrics
    first_token_s: float  # from the arrival of a request, all waits included
    total_s: float  # from the arrival, too
    access: AccessLog = field(default=Factory(lambda self: AccessLog(self.metrics), takes_self=True))
    spans: Spans = field(factory=Spans)
    _running: set[RequestRecord] = field(factory=set)
    _conversions: set[Conversion] = field(factory=set)

    @property
    def running(self) -> int:
        """The number of requests that are being answered, or wait for admission."""
        return len(self._running) + len(self._conversions)

    def find(self, model: str) -> ServedModel:
        """Return the model of that name; raises `ModelNotFound`."""
        if (served := self.served.get(model)) is None:
            base, _, adapter = model.rpartition(ADAPTER_MARK)
            if base in self.served:
                return self.served[base].with_adapter(adapter)
            names = ", ".join(sorted(self.served))
            raise ModelNotFound(f"no model {model!r} is served here; there is {names}", param="model")
        return served

    def find_or_only(self, model: str | None) -> ServedModel:
        """Return the model of that name, or the only one if None is named; raises `ModelNotFound` or `BadRequest`."""
        if model is None and len(self.served) > 1:
            names = ", ".join(sorted(self.served))
            raise BadRequest(f"several models are served here: {names}; name one", param="model")
        return self.find(next(iter(self.served), "") if model is None else model)

    @contextmanager
    def recording(self, record: RequestRecord) -> Iterator[None]:
        """Record how a request ends, while the body of the `with` statement answers it; `abort` can end it early.

        A bug in the body becomes an `InternalError`.
        """
        outcome, error = AskerLeft.code, None
        self._running.add(record)
        try:
            with record.scope:
                yield
            self._raise_if_cancelled(record)
            if record.reason is not None:
                outcome = record.reason.value
        except RequestError as raised:
            outcome, error = raised.code, raised
            raise
        except trio.BrokenResourceError:
            raise
        except Exception as bug:
            error = internal_error(bug, record.request_id, record.trace)
            outcome = error.code
            raise error from bug
        finally:
            self._running.discard(record)
            self._ended(record, outcome, error)

    @contextmanager
    def converting(self) -> Iterator[None]:
        """End the body of the `with` statement after `first_token_s`, or when `abort_all` is called.

        Raises `DeadlineExceeded` then, or why all was aborted.
        """
        with trio.move_on_after(self.first_token_s) as scope:
            self._conversions.add(conversion := Conversion(scope))
            try:
                yield
            finally:
                self._conversions.discard(conversion)
        if scope.cancelled_caught:
            raise conversion.aborted_by or DeadlineExceeded(f"there was no answer within {self.first_token_s} s")

    async def answer(
        self,
        request: Respond,
        served: ServedModel,
        record: RequestRecord,
        on_reply: Callable[[RenderedReply], None],
        on_token: Callable[[Text], None] | None = None,
    ) -> Answered:
        """Return the result of one request; `on_reply` is called with each reply, in the turn in which it comes.

        Where `on_token` is given, it may be called in its place with a plain token, and has to do the same for it. A
        response has at most the `total_max` tokens of its request, whichever engines come and go meanwhile. Raises the
        `RequestError` that ended it, or the error of `on_reply`. Its deadlines are those of the record's scope.
        """
        gaps = self.metrics.token_gaps(record.counted_model)

        def count_and_pass_on(reply: TextReply) -> None:
            if isinstance(reply, Text | Reasoning | CallPart):
                count_text(record, reply, gaps, trio.current_time())
            else:
                self._count(record, reply)
            on_reply(reply)

        pass_on = on_reply if on_token is None else on_token

        # The same as `count_text`, for one token behind others.
        def receive_token(text: Text, now: float) -> None:
            if (last_at := record.last_at) is not None and record.completion_tokens:
                gaps.observe(now - last_at)
            record.last_at = now
            record.completion_tokens += 1
            pass_on(text)

        record.scope.deadline = record.received_at + min(self.first_token_s, self.total_s)
        async with served.ask.ask(request, (request.total_max or 0) * request.choices) as answer:
            answered = await answer.relay(count_and_pass_on, fast_path=FastPath(receive_token))
        # Only `Answered` answers a `Respond`.
        assert isinstance(answered, Answered)
        record.completion_tokens = answered.usage.completion_tokens
        # `Started` counts the cached tokens of the first choice's prompt alone.
        record.cached_tokens = answered.usage.cached_tokens
        return answered

    async def compute(
        self, request: EmbedTexts | ScoreTexts, served: ServedEmbeddings, record: RequestRecord
    ) -> TextVectors | TextScores:
        """Return the vectors, or the scores, that one request asks for; raises the `RequestError` that ended it."""
        record.scope.deadline = record.received_at + self.total_s
        async with served.ask.ask(request, 0) as answer:
            computed = await answer.result()
        # Nothing else answers such a request.
        assert isinstance(computed, TextVectors | TextScores)
        record.prompt_tokens, record.reason = computed.tokens, FinishReason.STOP
        return computed

    def abort(self, record: RequestRecord | Conversion, why: RequestError) -> None:
        """End one request early; its `recording` or `converting` raises `why`."""
        if record.aborted_by is None:
            record.aborted_by = why
            record.scope.cancel(reason=why.code)

    def abort_all(self, why: RequestError) -> int:
        """End every request early, and return how many there were."""
        running: tuple[RequestRecord | Conversion, ...] = (*self._running, *self._conversions)
        for record in running:
            self.abort(record, why)
        return len(running)

    def _raise_if_cancelled(self, record: RequestRecord) -> None:
        """Raise the error by which `abort` or a deadline ended the request, if one did."""
        if not record.scope.cancelled_caught:
            return
        if record.aborted_by is not None:
            raise record.aborted_by
        if record.first_at is None and record.scope.deadline < record.received_at + self.total_s:
            raise DeadlineExceeded(f"there was no token within {self.first_token_s} s")
        raise DeadlineExceeded(f"the answer took longer than {self.total_s} s")

    def _count(self, record: RequestRecord, reply: Started | ChoiceEnded | Accepted) -> None:
        now = trio.current_time()
        match reply:
            case Started():
                record.first_at = record.last_at = now
                record.scope.deadline = record.received_at + self.total_s
                record.cached_tokens = record.route_cached_tokens = reply.cached_tokens
                record.route = reply.route
                self.metrics.first_token(record.counted_model, now - record.received_at)
            case ChoiceEnded():
                record.reason = reply.reason
            case Accepted():
                record.prepared_at = now
                record.prompt_tokens, record.reused_tokens = reply.prompt_tokens, reply.reused_tokens

    def _ended(self, record: RequestRecord, outcome: str, error: RequestError | None) -> None:
        record.ended = ResponseEnd(outcome, error, trio.current_time() - record.received_at)
        if error is not None:
            self.access.mark_logged(error)
        if record.settles:
            self.settle(record)

    def settle(self, record: RequestRecord, cut: str | None = None) -> None:
        """Log and count a request that has ended, once its client has as much of the response as it will get.

        `cut` is why the client got only a part; it is logged only if the response was complete here.
        """
        if (ended := record.ended) is None:
            return
        outcome, error = ended.outcome, ended.error
        if cut is not None and record.reason is not None and outcome == record.reason.value:
            outcome = CUT
            self.metrics.response_incomplete(record.api, cut)
        elif outcome == AskerLeft.code and cut in DROPPED:
            # This server ended the connection, not the client.
            outcome, error = SlowClient.code, SlowClient("the client did not read its answer")
        self.metrics.request_ended(record.counted_model, record.api, outcome, ended.duration_s, record.usage)
        line = record.line(outcome, error, duration_s=ended.duration_s, cut=cut if outcome == CUT else None)
        self.access.log_ended(line, error, admitted=record.admitted_at is not None)
        record_spans(record, self.spans, outcome, error, ended.duration_s)


def internal_error(bug: Exception, request_id: str, trace: Trace | None) -> RequestError:
    """Log an unexpected exception, and return the error for the client, which is `Overloaded` if memory ran out."""
    if isinstance(bug, MemoryError):
        log.error("no memory was left for a request", extra={"request_id": request_id, **log_fields(trace)})
        return Overloaded(NO_MEMORY)
    log.error("a bug failed a request", exc_info=bug, extra={"request_id": request_id, **log_fields(trace)})
    return InternalError("the server made a mistake; its log has the details")
