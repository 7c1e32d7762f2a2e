"""What all connections of a gateway share: the limits, who may knock, and the drain."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import TypeVar

import trio
from attrs import define, evolve, field, frozen

from actors.kit.offload import Offload, RunInThread, run_inline
from actors.processor import TextReply
from protocol.cost import cost, generations_of, multiplying_field
from protocol.dialects.request_body import reading_work
from protocol.errors import BadRequest, Draining, Forbidden, NotFound, RequestError, StartFailed
from protocol.grammars import kinds
from protocol.messages import Grammar, GrammarKind
from protocol.text_messages import Answered, Respond
from protocol.trace import Trace
from supervisor.config.keyfile import clamp_priority
from supervisor.config.limits import GatewayLimits
from supervisor.config.tls import Certificate
from supervisor.files.reading import FileReader
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.connections import Connections
from supervisor.gateway.keys import Headers, Key, Keys
from supervisor.gateway.memory_budgets import MemoryBudget
from supervisor.gateway.origins import Origins
from supervisor.gateway.outbox import Backlogs, Outbox
from supervisor.gateway.requests import RequestRecord, RequestRunner, ServedModel
from supervisor.gateway.websocket.history import ResponseHistories
from supervisor.sockets.descriptor_reserve import Reserve

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDING_A_TURN = 4  # of hundreds of connections that end together: nobody else's tokens may wait for all of them


def _unknown() -> dict[str, object]:
    raise NotFound("this server does not tell about itself")


async def _nothing_to_flush() -> None:
    await trio.lowlevel.checkpoint()
    raise NotFound("there is no cache here that could be flushed")


@frozen
class GatewayStatistics:
    """What a gateway has open, and what it holds of the limits that all clients share; all 0 when nobody is there."""

    connections: int
    requests: int  # that are being answered, or wait to be
    inside: int  # generations that have been admitted
    waiting: int  # requests that wait for that
    bodies_bytes: int
    answers_bytes: int
    histories_bytes: int
    backlogs_bytes: int


@define(eq=False)
class Gateway:
    """One gateway's connections and what they need."""

    runner: RequestRunner
    gate: AdmissionGate
    limits: GatewayLimits
    origins: Origins
    unready: Callable[[], str | None]  # why a load balancer had better not send anybody here now
    new_id: Callable[[], str]
    now: Callable[[], float]
    metrics_text: Callable[[], Awaitable[bytes]]
    keys: Keys
    certificate: Certificate | None  # None: plain HTTP
    tls: ssl.SSLContext | None  # made from `certificate`
    server_info: Callable[[], dict[str, object]] = _unknown
    flush_cache: Callable[[], Awaitable[None]] = _nothing_to_flush
    aside: RunInThread = run_inline  # where long bodies are read
    grammars: frozenset[str] = frozenset(GrammarKind)  # that requests may use whose key does not say which
    port: int | None = None  # once the gateway listens
    reserve: Reserve = field(factory=Reserve)  # of descriptors, which no connection takes
    connections: Connections = field(init=False)
    bodies: MemoryBudget = field(init=False)
    answers: MemoryBudget = field(init=False)
    histories: ResponseHistories = field(init=False)
    backlogs: Backlogs = field(init=False)
    ending: trio.Semaphore = field(factory=lambda: trio.Semaphore(ENDING_A_TURN))
    reading: trio.Semaphore = field(factory=lambda: trio.Semaphore(1))  # many small pieces of what a client says

    def __attrs_post_init__(self) -> None:
        answers, share = "answers in one piece (answers_bytes_max)", lambda: self.limits.key_share_max
        self.connections = Connections(lambda: self.limits, self.runner.metrics)
        self.bodies = MemoryBudget("requests (bodies_bytes_max)", lambda: self.limits.bodies_bytes_max, share)
        self.answers = MemoryBudget(answers, lambda: self.limits.answers_bytes_max, share)
        self.histories = ResponseHistories(lambda: self.limits.histories_bytes_max)
        self.backlogs = Backlogs(lambda: self.limits.backlogs_bytes_max)

    # Who may call ------------------------------------------------------------------------

    def let_in(self, outbox: Outbox, headers: Headers) -> None:
        """Let a request in that needs no key; raises `Forbidden`. Where keys are wanted it authenticates nobody."""
        self.origins.check(headers)
        if not self.keys.wanted:
            self.connections.authenticated(outbox, None)

    def authenticate(self, headers: Headers, *, admin: bool = False) -> Key:
        """Return the key of a request; raises `Unauthorized`, or `Forbidden` where only an admin's key will do."""
        return self.keys.find(headers, admin=admin)

    def knock(self, outbox: Outbox, headers: Headers, *, admin: bool = False) -> Key:
        """Return the key of a request that comes over this connection, which from now on is counted as the key's.

        Raises `Forbidden`, `Unauthorized`, or `ConcurrencyLimited` if the key has too many connections.
        """
        self.origins.check(headers)
        key = self.authenticate(headers, admin=admin)
        self.connections.authenticated(outbox, None if key is self.keys.anonymous else key)
        return key

    def statistics(self) -> GatewayStatistics:
        """Return what the gateway has open and holds of its limits."""
        return GatewayStatistics(
            connections=len(self.connections),
            requests=self.runner.running,
            inside=self.gate.inside,
            waiting=self.gate.waiting,
            bodies_bytes=self.bodies.reserved_bytes,
            answers_bytes=self.answers.reserved_bytes,
            histories_bytes=self.histories.size_bytes,
            backlogs_bytes=self.backlogs.size_bytes,
        )

    # What is told of them ----------------------------------------------------------------

    def log_refused(
        self,
        error: RequestError,
        *,
        request_id: str,
        what: str,
        key: Key | None = None,
        status: int | None = None,
        trace: Trace | None = None,
        probe: bool = False,
    ) -> None:
        """Tell the access log and the metrics of an error, unless `answer` raised it, which has told already."""
        name = "-" if key is None else key.name
        self.runner.access.log_refused(
            error, request_id=request_id, what=what, key=name, status=status, trace=trace, probe=probe
        )

    def log_answered(
        self,
        request_id: str,
        what: str,
        status: int,
        key: Key | None,
        asked_at: float,
        trace: Trace | None = None,
        *,
        probe: bool = False,
    ) -> None:
        """Tell the access log of a request that no model was asked for."""
        name = "-" if key is None else key.name
        took_s = trio.current_time() - asked_at
        self.runner.access.log_answered(request_id, what, status, name, took_s, trace, probe=probe)

    # What becomes of them ----------------------------------------------------------------

    async def reload(self, read: FileReader) -> list[str]:
        """Read keys and certificate anew, for whoever comes from now on; what cannot be read stays as it was.

        Returns why, a sentence for each of them.
        """
        stay: list[str] = []
        try:
            self.keys.replace(await read(self.keys.sources.read))
            log.info("read the keys", extra={"keys": self.keys.count})
        except StartFailed as error:
            log.error("the keys stay as they were", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            stay.append(f"the keys stay as they were: {error}")
        try:
            if self.certificate is not None:
                self.tls = await read(self.certificate.context)
        except StartFailed as error:
            log.error("the certificate stays as it was", extra={"reason": str(error)})  # noqa: TRY400
            stay.append(f"the certificate stays as it was: {error}")
        return stay

    def drain(self) -> None:
        """Admit nothing new and let idle connections go; those that are answered end after their answer."""
        self.gate.drain()
        self.connections.drain()

    def cut_reason(self, outbox: Outbox) -> str:
        """Return why a client has not got all of an answer: it read too slowly, it left, or a drain's time was over."""
        return outbox.drop_reason or ("drain" if self.gate.draining and outbox.let_go else "left")

    def abort(self) -> int:
        """End every answer that still runs with a retryable error, and return how many there were.

        Requests that have come in part hear the same: the rest of them would be refused.
        """
        self.connections.refuse_partial()
        return self.runner.abort_all(Draining("the server is shutting down"))

    async def answer(
        self,
        request: Respond,
        served: ServedModel,
        counted: RequestRecord,
        into: Callable[[TextReply], None],
        finish: Callable[[Answered], T],
    ) -> T:
        """Admit one request, relay its answer into `into`, and return what `finish` makes of the whole.

        Raises the `RequestError` that ended it; a bug in `into` or `finish` ends it in `Internal`.
        """
        key = counted.key or self.keys.anonymous
        priority = clamp_priority(request.priority, key.section.priority)
        weight, param = generations_of(request), multiplying_field(request)
        with self.runner.counting(counted), key.generating(weight, param):
            if request.grammar is not None:
                await self._check_grammar(request, request.grammar, key)
            # Engines come and go while a request waits: what it may have is looked up once, for all who bound it.
            request = evolve(request, total_max=served.total_max())
            gathered_bytes = self._gathered_bytes(request, counted)
            at_most = self.concurrency_of(key)
            async with self.gate.admitted(priority, owner=key.name, weight=weight, at_most=at_most, param=param):
                counted.admitted_at = trio.current_time()
                if counted.held is not None:  # until the client has it
                    counted.held.grow(gathered_bytes)
                request = evolve(request, priority=priority, trace=counted.trace, owner=key.name)
                answered = await self.runner.answer(request, served, counted, into)
            return finish(answered)  # in here: an answer that cannot be built must not be counted as whole

    async def _check_grammar(self, request: Respond, grammar: Grammar, key: Key) -> None:
        """Raise `Forbidden`, with the client's name of the field, for a kind of grammar that a key may not use."""
        own = key.section.grammars
        may = self.grammars if own is None else own
        tag = grammar.kind is GrammarKind.STRUCTURAL_TAG  # its text says which kinds it holds
        found = await Offload(self.aside, key.name).run(
            reading_work(grammar.text) if tag else 0, partial(kinds, grammar)
        )
        if (kind := next((each for each in found if each not in may), None)) is None:
            return
        within = "" if kind is grammar.kind else f" in a {grammar.kind}"
        who = "requests here" if key is self.keys.anonymous else f"the key {key.name!r}"
        raise Forbidden(
            f"{who} may not use grammars of the kind {kind}{within}: allowed are {', '.join(sorted(may)) or 'none'}",
            param=request.params.get("grammar", "grammar"),
        )

    def _gathered_bytes(self, request: Respond, counted: RequestRecord) -> int:
        """Return what an answer that is kept until it is whole may take; raises `BadRequest` if that is never there."""
        asks = cost(request, gathered=counted.held is not None)
        if asks.gathered_bytes > (most := self.limits.answers_bytes_max):
            raise BadRequest(
                f"an answer of {asks.tokens} tokens in one piece may take {asks.gathered_bytes} bytes of memory,"
                f" and there are {most} (answers_bytes_max): ask for less, or stream it",
                param=request.params.get("tokens_max", "max_tokens"),
            )
        return asks.gathered_bytes

    def memory_owner(self, key: Key | None) -> str | None:
        """Return in whose name memory is taken; None where no keys are wanted."""
        return None if key is None or key is self.keys.anonymous else key.name

    def concurrency_of(self, key: Key) -> float:
        """Return how many generations may be inside the gate in the name of one key."""
        return inf if key is self.keys.anonymous else key.section.concurrency_max or self.limits.key_requests_max

    async def wait_turn(self) -> None:
        """Wait until no other client has many small pieces read in this turn of the event loop.

        However many clients send nothing else, everybody else waits for one of them at a time.
        """
        async with self.reading:
            await trio.lowlevel.checkpoint()
