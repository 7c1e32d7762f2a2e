"""The gateway: limits, keys, memory, admission and the drain, which all its connections share.

The gateway is the only part of a node that unknown clients can reach: any number of them, at any speed, with any
intent. So everything that a client can make it store or wait for is bounded twice: for each connection, and for all
together. Three rules follow. Memory beyond a limit is refused, never waited for. A body is parsed only after its key
and its origin have been checked. All decisions (admission, keys, origins, budgets) are made here, from headers and
parsed requests, without any import of HTTP or WebSocket; `http` and `websocket` hold a `Gateway` and decide nothing, so
all protocols have the same limits.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TypeVar

import trio
from attrs import define, evolve, field, frozen

from actors.kit.shares import BudgetLimits
from protocol.access import Access
from protocol.cost import cost, generations_of, multiplying_field
from protocol.dialects.targets import NO_TARGETS, Targets
from protocol.errors import BadRequest, Draining, NotReady, RequestError, StartFailed, Unsupported
from protocol.messages.cluster import GateState
from protocol.messages.embedding import EmbeddingInfo, EmbeddingOutput, EmbedTexts, ScoreTexts, TextScores, TextVectors
from protocol.messages.text import Answered, Respond, Text
from protocol.tenants import tenant_salt, tenant_session
from supervisor.files.reading import FileReader
from supervisor.gateway.access_log import AccessLog
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.connections import Connections
from supervisor.gateway.keys.grammar_kinds import KINDS, check_grammars
from supervisor.gateway.keys.keys import ClientKey, Headers, Keys
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.listening import GatewayPort
from supervisor.gateway.memory import ANSWER_BYTES_FREE, GatewayMemory
from supervisor.gateway.open_streams import KEEPALIVE_S, OpenStreams
from supervisor.gateway.origins import Origins
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.ports import Administration, GatewayRuntime, Probes
from supervisor.gateway.request_record import RequestRecord
from supervisor.gateway.requests import RenderedReply, RequestRunner, ServedModel
from supervisor.gateway.turns import LoopTurns

log = logging.getLogger(__name__)

T = TypeVar("T")

# In which a client that does not know of the end yet may send one more request to a gateway that leaves its port.
LAST_REQUEST_S = 1.0

ANSWER_ROUTES = "POST /v1/chat/completions, /v1/completions or /v1/responses"


@frozen
class GatewayStatistics:
    """Counts of a gateway's open connections and requests, and its use of the shared limits; all 0 without clients."""

    connections: int
    requests: int  # that are being answered, or wait for admission
    inside: int  # generations that have been admitted
    waiting: int  # requests that wait for admission
    bodies_bytes: int
    answers_bytes: int
    histories_bytes: int
    backlogs_bytes: int


@frozen
class VectorsSize:
    """The most memory of an answer with vectors or scores, and the words for a request that asks for too much."""

    bytes: int
    what: str  # the answer has
    instead: str  # may be asked for
    param: str


@define(eq=False)
class Gateway:
    """One gateway: its connections, and what they share."""

    runner: RequestRunner
    gate: AdmissionGate
    limits: GatewayLimits
    keys: Keys
    origins: Origins
    port: GatewayPort
    runtime: GatewayRuntime
    probes: Probes
    administration: Administration
    grammars: frozenset[str] = KINDS  # kinds that requests may use whose key names none of its own
    leave_out_tools: frozenset[str] = frozenset()  # types of tools of other servers, which are refused otherwise
    keepalive_s: float = KEEPALIVE_S  # without anything sent, then a stream sends a comment; 0: none does
    draining: bool = False  # connections get no further request
    connections: Connections = field(init=False)
    memory: GatewayMemory = field(init=False)
    streams: OpenStreams = field(init=False)
    turns: LoopTurns = field(factory=LoopTurns)

    def __attrs_post_init__(self) -> None:
        self.connections = Connections(lambda: self.limits, self.runner.metrics, lambda: self.keys.several)
        self.memory = GatewayMemory.within(lambda: self.limits)
        self.streams = OpenStreams(lambda: self.keepalive_s)

    # Who may call ------------------------------------------------------------------------

    def authorize(
        self, outbox: Outbox, headers: Headers, access: Access = Access.KEY, *, probe: bool = False
    ) -> ClientKey:
        """Return the key of a request, and count its connection in the name of that key from now on.

        A request to an open operation needs no key, and one that it has decides only what its answer shows: its
        connection counts for no key, and where keys are wanted goes on counting as unauthenticated. A probe may come by
        any host name.

        Raises `Forbidden`, `Unauthorized`, or `ConcurrencyLimited` if the key has too many connections.
        """
        self.origins.check_headers(headers, any_host=probe)
        anonymous = self.keys.anonymous
        if access is Access.OPEN:
            key = self.keys.presented(headers) or anonymous
        else:
            key = self.keys.find(headers, admin=access is Access.ADMIN)
        if access is not Access.OPEN:
            self.connections.authenticated(outbox, None if key is anonymous else key)
        elif not self.keys.wanted:
            self.connections.authenticated(outbox, None)
        return key

    @property
    def access_log(self) -> AccessLog:
        """The log of all requests; the runner logs the requests of `answer`."""
        return self.runner.access

    def why_unready(self) -> str | None:
        """Return why clients cannot be served now, None if they can: also, that none can connect."""
        unlistening = self.port.shared and not self.port.listens
        return self.probes.unready() or ("it does not listen yet" if unlistening else None)

    def gate_state(self) -> GateState:
        """Return the state of the admission gate, for operators; `unready` also until this can replace another."""
        return evolve(self.gate.state(), unready=self.why_unready() or "")

    def statistics(self) -> GatewayStatistics:
        """Return what the gateway has open, and uses of its limits."""
        return GatewayStatistics(
            connections=len(self.connections),
            requests=self.runner.running,
            inside=self.gate.inside,
            waiting=self.gate.waiting,
            bodies_bytes=self.memory.bodies.reserved_bytes,
            answers_bytes=self.memory.answers.reserved_bytes,
            histories_bytes=self.memory.histories.size_bytes,
            backlogs_bytes=self.memory.backlogs.size_bytes,
        )

    def shown(self, error: RequestError, key: ClientKey | None) -> RequestError:
        """Return an error as its client may see it: with names of nodes and engines only for operators."""
        if error.client_detail == error.detail or self.keys.administers(key):
            return error
        shown = type(error)(error.client_detail, param=error.param, retry_after_s=error.retry_after_s)
        self.access_log.replace(error, shown)
        return shown

    # Reload and drain --------------------------------------------------------------------

    async def reload(self, read: FileReader) -> list[str]:
        """Read keys and certificate again, for new requests; what cannot be read stays as it was.

        Returns one sentence for each of the two that could not be read.
        """
        unchanged: list[str] = []
        try:
            self.keys.replace(await read(self.keys.sources.read))
            log.info("read the keys", extra={"keys": self.keys.count})
        except StartFailed as error:
            log.error("the keys stay as they were", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            unchanged.append(f"the keys stay as they were: {error}")
        if (refused := await self.port.reload_certificate(read)) is not None:
            unchanged.append(refused)
        return unchanged

    @property
    def closes_connections(self) -> bool:
        """Whether each response that begins from now on is the last of its connection, and announces it."""
        return self.port.leaving or self.draining

    @property
    def idle_s(self) -> float:
        """The time in seconds in which the next request of a connection may come.

        A gateway that leaves its port serves one more: the answer before it may have begun without `connection: close`.
        One that drains without others at its port would refuse it.
        """
        if not self.closes_connections:
            return self.limits.idle_s
        return min(LAST_REQUEST_S, self.limits.idle_s) if self.port.leaving else 0.0

    async def wait_last_requests(self) -> None:
        """Wait, after `port.leave`, until each client that had connected there has sent its first request.

        A further request over an idle connection is answered for `LAST_REQUEST_S`: its client learns that this was the
        last one.
        """
        idle_until = trio.current_time() + LAST_REQUEST_S
        await self.port.wait_left()
        # Meanwhile the tasks of the last connections have begun.
        await trio.sleep_until(idle_until)
        await self.connections.wait_received()

    def drain(self) -> None:
        """Close idle connections, and the others after their last response; admit nothing new.

        Where others share the port, all received requests are admitted, even waiting ones: later requests reach the
        others.
        """
        self.draining = True
        if not self.port.shared:
            self.gate.drain()
        self.connections.drain()

    def cut_reason(self, outbox: Outbox) -> str:
        """Return why a client got only part of a response: `backlog`, `stalled`, `silent`, `left` or `drain`."""
        return outbox.drop_reason or ("drain" if self.draining and outbox.closed_here else "left")

    def abort(self) -> int:
        """End every response that still runs with a retryable error, and return how many there were.

        Requests of which a part has been received are refused at once: they would be refused as a whole, too.
        """
        self.gate.drain()
        self.connections.refuse_partial()
        return self.runner.abort_all(Draining("the server is shutting down"))

    async def answer(
        self,
        request: Respond,
        served: ServedModel,
        record: RequestRecord,
        on_reply: Callable[[RenderedReply], None],
        finish: Callable[[Answered], T],
        on_token: Callable[[Text], None] | None = None,
    ) -> T:
        """Admit one request, call `on_reply` with each reply, and return what `finish` makes of the complete answer.

        `on_token` may be called in place of `on_reply`, as in `RequestRunner.answer`. Raises the `RequestError` that
        ended it; a bug in `on_reply` or `finish` ends it with `InternalError`.
        """
        if served.embeddings is not None:
            raise served.embeddings.refuse_answer(record.model)
        key = record.key or self.keys.anonymous
        priority = key.clamp_priority(request.priority)
        weight, param = generations_of(request), multiplying_field(request)
        with self._shown_to(key), self.runner.recording(record), key.generating(weight, param):
            if request.grammar is not None or request.tools:
                await check_grammars(request, key, self.grammars, self.runtime.run_in_thread)
            # Engines come and go while a request waits, so its limit is read once, for everything that depends on it.
            total_max = served.total_max()
            request = evolve(request, total_max=total_max, priority=priority, trace=record.trace, owner=key.name)
            if served.adapter is not None:
                request, record.base = evolve(request, adapter=served.adapter), served.base
            request = _of_tenant(request, key.section.tenant)
            request = _with_targets(request, record.targets, key.section.targets, served.targets)
            gathered_bytes = self._gathered_bytes(request, record)
            places = self.places_of(key, weight)
            async with self.gate.admitted(priority, owner=key.name, weight=weight, limits=places, param=param):
                record.admitted_at = trio.current_time()
                # The memory stays reserved until the client has the response.
                if record.memory is not None:
                    record.memory.grow(gathered_bytes)
                answered = await self.runner.answer(request, served, record, on_reply, on_token)
            # Still recorded: a response that cannot be built must not count as complete.
            return finish(answered)

    async def compute(
        self,
        request: EmbedTexts | ScoreTexts,
        record: RequestRecord,
        size: Callable[[EmbeddingInfo], VectorsSize],
        finish: Callable[[TextVectors | TextScores], Awaitable[T]],
    ) -> T:
        """Admit one request for vectors or scores, and return what `finish` makes of them, within its deadline.

        It takes one place, however many texts it has: its parts take turns with those of others at each embedder.
        Raises the `RequestError` that ended it.
        """
        served = self.runner.find(record.model).embeddings
        if served is None:
            raise Unsupported(f"model {record.model} computes answers: ask {ANSWER_ROUTES}", param="model")
        key = record.key or self.keys.anonymous
        priority, record.items = key.clamp_priority(request.priority), request.count
        owned = evolve(request, priority=priority, trace=record.trace, owner=key.name)
        with self._shown_to(key), self.runner.recording(record), key.generating():
            if (info := served.info()) is None:
                raise NotReady("no engine has been ready for this model yet")
            if isinstance(request, EmbedTexts) and info.output is EmbeddingOutput.SCORES:
                raise served.refuse_vectors(record.model)
            needed = size(info)
            if needed.bytes > (bytes_max := self.answer_bytes_max(key)):
                raise BadRequest(
                    f"{needed.what} may take {needed.bytes} bytes of memory, and one request can have {bytes_max} of"
                    f" the {self.limits.answers_bytes_max} for all (answers_bytes_max): {needed.instead}",
                    param=needed.param,
                )
            async with self.gate.admitted(priority, owner=key.name, limits=self.places_of(key)):
                record.admitted_at = trio.current_time()
                # The memory stays reserved until the client has the response.
                if record.memory is not None:
                    record.memory.grow(needed.bytes)
                computed = await self.runner.compute(owned, served, record)
            return await finish(computed)

    @contextmanager
    def _shown_to(self, key: ClientKey) -> Iterator[None]:
        """Raise errors of the body as a client may see them; a record of the request keeps the error itself."""
        try:
            yield
        except RequestError as error:
            if (shown := self.shown(error, key)) is error:
                raise
            raise shown from error

    def _gathered_bytes(self, request: Respond, record: RequestRecord) -> int:
        """Return the bytes that a response may take if it is sent whole; raises `BadRequest` if it never fits."""
        needed = cost(request, gathered=record.memory is not None)
        if needed.gathered_bytes > (bytes_max := self.answer_bytes_max(record.key)):
            param = request.params.get("tokens_max", "max_tokens")
            many = f"{needed.generations} answers" if needed.generations > 1 else "an answer"
            what = f"{many} of {needed.tokens} tokens in one piece"
            fewer = f", or for fewer answers ({multiplying_field(request)})" if needed.generations > 1 else ""
            instead = f"stream it, or ask for fewer tokens{fewer}"
            if request.echo:  # it takes the memory in a stream, too
                scores = f" and {request.logprobs} log probabilities a token" if request.logprobs else ""
                param, what = "echo", f"an answer that echoes its prompts{scores}"
                instead = f"ask for {'fewer logprobs' if scores else 'less'}, or send fewer prompts at a time"
            raise BadRequest(
                f"{what} may take {needed.gathered_bytes} bytes of memory, and one request can have {bytes_max} of the"
                f" {self.limits.answers_bytes_max} for all (answers_bytes_max): {instead}",
                param=param,
            )
        return needed.gathered_bytes

    def answer_bytes_max(self, key: ClientKey | None) -> int:
        """Return the most memory that one response in one piece to a key can have."""
        return self.memory.answers.request_max(self.memory_owner(key)) + ANSWER_BYTES_FREE

    def memory_owner(self, key: ClientKey | None) -> str | None:
        """Return the name under which memory is reserved for a key; None for a caller without one."""
        return None if key is None or key is self.keys.anonymous else key.name

    def places_of(self, key: ClientKey, weight: int = 1) -> BudgetLimits:
        """Return the limits of the places for the generations of a key.

        A single request of the only key may have all places.
        """
        places, own_max = self.gate.requests_max, key.section.concurrency_max or self.limits.key_requests_max
        if self.keys.several:
            return BudgetLimits.of_all_sizes(places, own_max)
        return BudgetLimits(places, inf if key is self.keys.anonymous else max(own_max, weight))


def _of_tenant(request: Respond, tenant: str) -> Respond:
    """Return a request with the caches and the session of a tenant."""
    salt, session = tenant_salt(tenant, request.cache_salt), tenant_session(tenant, request.session)
    if (salt, session) == (request.cache_salt, request.session):
        return request
    return evolve(request, cache_salt=salt, session=session)


def _with_targets(request: Respond, headers: Targets, key: Targets, fields: frozenset[str]) -> Respond:
    """Return a request with its own targets, or else those of its headers, or of its key; `fields` the model reads.

    Raises `Unsupported` for a target of the request or of its headers that the model does not read. A key may be for
    several models, so targets of a key count where they are read.
    """
    own = Targets(request.ttft_target_ms, request.itl_target_ms)
    if own == headers == key == NO_TARGETS:
        return request
    stated = own.or_else(headers)
    stated.check_read(fields)
    targets = stated.or_else(key.read_by(fields))
    return evolve(request, ttft_target_ms=targets.ttft_ms, itl_target_ms=targets.itl_ms)
