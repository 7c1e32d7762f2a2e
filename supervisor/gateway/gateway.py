"""The gateway: limits, keys, memory, admission and the drain, which all its connections share.

The gateway is the only part of a node that unknown clients can reach: any number of them, at any speed, with any
intent. Whatever a client can make it store or wait for is therefore bounded twice: for each connection, and for all
together. Three rules follow. What exceeds a limit of memory is refused or dropped, and never waits for memory. A body
is parsed only after its key and its origin have been checked. And the parts that decide (admission, keys, origins,
budgets) are held here and know nothing of HTTP or WebSocket, while `http` and `websocket` hold a `Gateway` and decide
nothing, so that all protocols have the same limits.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import inf
from typing import TypeAlias, TypeVar

import trio
from attrs import define, evolve, field, frozen

from actors.kit.offload import Offload, RunInThread, run_inline
from actors.processor import TextReply
from protocol.access import Access
from protocol.cost import cost, generations_of, multiplying_field
from protocol.dialects.request_body import reading_work
from protocol.dialects.targets import NO_TARGETS, Targets
from protocol.errors import BadRequest, Draining, Forbidden, NotFound, RequestError, StartFailed
from protocol.messages.cluster import GateState
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import grammar_kinds
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF
from protocol.messages.text import Answered, Respond, Text
from supervisor.config.certificate import Certificate
from supervisor.files.reading import FileReader
from supervisor.gateway.access_log import AccessLog
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.connections import Connections
from supervisor.gateway.heads.origins import Origins
from supervisor.gateway.histories import ResponseHistories
from supervisor.gateway.keys.keys import ClientKey, Headers, Keys
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.memory_budgets import Backlogs, MemoryBudget
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import RequestRecord, RequestRunner, ServedModel
from supervisor.sockets.descriptor_reserve import DescriptorReserve

log = logging.getLogger(__name__)

T = TypeVar("T")

# In which a client that does not know of the end yet may send one more request to a gateway that leaves its port.
LAST_REQUEST_S = 1.0
LONG_BODIES_A_TURN = 4  # of which a piece is read in one pass of the event loop
ENDING_A_TURN = 4  # connections that may end in one turn: hundreds that end together must not delay other tokens


def _no_server_info() -> dict[str, object]:
    raise NotFound("this server gives no information about itself")


def _no_pools() -> dict[str, object]:
    return {"pools": [], "grids": []}


async def _no_engines(request: Message, _: str | None) -> Mapping[str, Message | RequestError]:
    await trio.lowlevel.checkpoint()
    raise NotFound(f"there is no engine here that could carry out {OPERATION_OF[type(request)].name}")


def _nothing_missing() -> str | None:
    return None


OperateEngines: TypeAlias = Callable[[Message, str | None], Awaitable[Mapping[str, Message | RequestError]]]
"""Have the engine of a name, or every engine, carry out an operation; the outcomes are by engine."""


@frozen
class GatewayStatistics:
    """Counts of what a gateway has open and uses of the limits that all clients share; all 0 without clients."""

    connections: int
    requests: int  # that are being answered, or wait for admission
    inside: int  # generations that have been admitted
    waiting: int  # requests that wait for admission
    bodies_bytes: int
    answers_bytes: int
    histories_bytes: int
    backlogs_bytes: int


@define(eq=False)
class Gateway:
    """One gateway: its connections, and what they share."""

    runner: RequestRunner
    gate: AdmissionGate
    limits: GatewayLimits
    origins: Origins
    unready: Callable[[], str | None]  # why this server cannot serve now, None if it can
    new_id: Callable[[], str]
    now: Callable[[], float]
    metrics_text: Callable[[], Awaitable[bytes]]
    keys: Keys
    certificate: Certificate | None  # None: plain HTTP
    tls: ssl.SSLContext | None  # made from `certificate`
    wait_ready: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint  # until requests are admitted
    missing: Callable[[], str | None] = _nothing_missing  # what some requests need; all others can be served
    server_info: Callable[[], dict[str, object]] = _no_server_info
    pools: Callable[[], dict[str, object]] = _no_pools
    operations: OperateEngines = _no_engines
    run_in_thread: RunInThread = run_inline  # for long texts: to parse one would block the event loop
    grammars: frozenset[str] = frozenset(GrammarKind)  # kinds that requests may use whose key does not name its own
    port: int | None = None  # once the gateway listens
    shares_port: bool = False  # with other gateways of this machine
    leaving: bool = False  # it has left that port, and each connection closes after its next answer
    draining: bool = False  # connections get no further request
    listens: bool = False  # clients can connect
    reserve: DescriptorReserve = field(factory=DescriptorReserve)  # file descriptors that no connection may take
    connections: Connections = field(init=False)
    bodies: MemoryBudget = field(init=False)
    answers: MemoryBudget = field(init=False)
    histories: ResponseHistories = field(init=False)
    backlogs: Backlogs = field(init=False)
    ending: trio.Semaphore = field(factory=lambda: trio.Semaphore(ENDING_A_TURN))
    reading: trio.Semaphore = field(factory=lambda: trio.Semaphore(1))  # held while many small pieces are read
    reading_bodies: trio.Semaphore = field(factory=lambda: trio.Semaphore(LONG_BODIES_A_TURN))
    _listening: trio.CancelScope | None = None
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)  # whether it listens

    def __attrs_post_init__(self) -> None:
        answers, share = "answers in one piece (answers_bytes_max)", lambda: self.limits.key_share_max
        self.connections = Connections(lambda: self.limits, self.runner.metrics)
        self.bodies = MemoryBudget("requests (bodies_bytes_max)", lambda: self.limits.bodies_bytes_max, share)
        self.answers = MemoryBudget(answers, lambda: self.limits.answers_bytes_max, share)
        self.histories = ResponseHistories(lambda: self.limits.histories_bytes_max)
        self.backlogs = Backlogs(lambda: self.limits.backlogs_bytes_max)

    # Who may call ------------------------------------------------------------------------

    def authorize(self, outbox: Outbox, headers: Headers, access: Access = Access.KEY) -> ClientKey:
        """Return the key of a request, and count its connection in the name of that key from now on.

        A request to an open operation needs no key. Where keys are wanted, its connection goes on counting as
        unauthenticated.

        Raises `Forbidden`, `Unauthorized`, or `ConcurrencyLimited` if the key has too many connections.
        """
        self.origins.check_headers(headers)
        anonymous = self.keys.anonymous
        key = anonymous if access is Access.OPEN else self.keys.find(headers, admin=access is Access.ADMIN)
        if access is not Access.OPEN or not self.keys.wanted:
            self.connections.authenticated(outbox, None if key is anonymous else key)
        return key

    @property
    def access_log(self) -> AccessLog:
        """The log of all requests; those that `answer` has recorded are logged by the runner."""
        return self.runner.access

    def why_unready(self) -> str | None:
        """Return why clients cannot be served now, None if they can: also, that none can connect."""
        return self.unready() or ("it does not listen yet" if self.shares_port and not self.listens else None)

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
            bodies_bytes=self.bodies.reserved_bytes,
            answers_bytes=self.answers.reserved_bytes,
            histories_bytes=self.histories.size_bytes,
            backlogs_bytes=self.backlogs.size_bytes,
        )

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
        try:
            if self.certificate is not None:
                self.tls = await read(self.certificate.context)
        except StartFailed as error:
            log.error("the certificate stays as it was", extra={"reason": str(error)})  # noqa: TRY400
            unchanged.append(f"the certificate stays as it was: {error}")
        return unchanged

    def new_listening_scope(self) -> trio.CancelScope:
        """Return the scope in which the gateway accepts connections."""
        self._listening = trio.CancelScope()
        if self.leaving:
            self._listening.cancel(reason="other gateways have the port")
        return self._listening

    def listening_begun(self) -> None:
        """Note that clients can connect."""
        self.listens = True
        self._changed.unpark_all()

    def listening_ended(self) -> None:
        """Note that no more connections will come: all that waited at the port have been taken."""
        self.listens, self._listening = False, None
        self._changed.unpark_all()

    async def wait_listening(self) -> None:
        """Wait until clients can connect, or never will again."""
        await trio.lowlevel.checkpoint()
        while not (self.listens or self.leaving):
            await self._changed.park()

    def leave_port(self) -> None:
        """Leave a port that others share: new clients reach those, and here each may still make one request."""
        self.leaving = True
        if self._listening is not None:
            self._listening.cancel(reason="other gateways have the port")
        self._changed.unpark_all()

    @property
    def closes_connections(self) -> bool:
        """Whether each answer that begins from now on is the last of its connection, and says so."""
        return self.leaving or self.draining

    @property
    def idle_s(self) -> float:
        """The time in seconds in which the next request of a connection may come.

        A gateway that leaves its port serves one more: the answer before it may have begun without `connection: close`.
        One that drains without others at its port would refuse it.
        """
        if not self.closes_connections:
            return self.limits.idle_s
        return min(LAST_REQUEST_S, self.limits.idle_s) if self.leaving else 0.0

    async def wait_last_requests(self) -> None:
        """Wait, after `leave_port`, until each client that had connected there has sent its first request.

        A further request over an idle connection is answered for `LAST_REQUEST_S`: its client learns that this was the
        last one.
        """
        idle_until = trio.current_time() + LAST_REQUEST_S
        while self._listening is not None:
            await self._changed.park()
        await trio.sleep_until(idle_until)  # meanwhile the tasks of the connections that were taken last have begun
        await self.connections.wait_received()

    def drain(self) -> None:
        """Close idle connections, and the others after their last response; admit nothing new.

        Where others share the port, the requests that have come are admitted, even those that wait: the next go there.
        """
        self.draining = True
        if not self.shares_port:
            self.gate.drain()
        self.connections.drain()

    def cut_reason(self, outbox: Outbox) -> str:
        """Return why a client got only part of a response: `backlog`, `stalled`, `left` or `drain`."""
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
        on_reply: Callable[[TextReply], None],
        finish: Callable[[Answered], T],
        on_token: Callable[[Text], None] | None = None,
    ) -> T:
        """Admit one request, call `on_reply` with each reply, and return what `finish` makes of the complete answer.

        `on_token` may be called in place of `on_reply`, as `RequestRunner.answer` says.
        Raises the `RequestError` that ended it; a bug in `on_reply` or `finish` ends it with `InternalError`.
        """
        key = record.key or self.keys.anonymous
        priority = key.clamp_priority(request.priority)
        weight, param = generations_of(request), multiplying_field(request)
        with self.runner.recording(record), key.generating(weight, param):
            if request.grammar is not None:
                await self._check_grammar(request, request.grammar, key)
            # Engines come and go while a request waits, so its limit is read once, for everything that depends on it.
            total_max = served.total_max()
            request = evolve(request, total_max=total_max, priority=priority, trace=record.trace, owner=key.name)
            request = _with_targets(request, record.targets.or_else(key.section.targets))
            gathered_bytes = self._gathered_bytes(request, record)
            owner_max = self.concurrency_of(key)
            async with self.gate.admitted(priority, owner=key.name, weight=weight, owner_max=owner_max, param=param):
                record.admitted_at = trio.current_time()
                if record.memory is not None:  # reserved until the client has the response
                    record.memory.grow(gathered_bytes)
                answered = await self.runner.answer(request, served, record, on_reply, on_token)
            return finish(answered)  # while it is recorded: a response that cannot be built must not count as complete

    async def _check_grammar(self, request: Respond, grammar: Grammar, key: ClientKey) -> None:
        """Raise `Forbidden`, with the client's name of the field, for a kind of grammar that a key may not use."""
        own = key.section.grammars
        allowed = self.grammars if own is None else own
        tag = grammar.kind is GrammarKind.STRUCTURAL_TAG  # a text that contains grammars of other kinds
        kinds = await Offload(self.run_in_thread, key.name).run(
            reading_work(grammar.text) if tag else 0, partial(grammar_kinds, grammar)
        )
        if (kind := next((kind for kind in kinds if kind not in allowed), None)) is None:
            return
        names, within = ", ".join(sorted(allowed)) or "none", "" if kind is grammar.kind else f" in a {grammar.kind}"
        who = "requests here" if key is self.keys.anonymous else f"the key {key.name!r}"
        raise Forbidden(
            f"{who} may not use grammars of the kind {kind}{within}: allowed are {names}",
            param=request.params.get("grammar", "grammar"),
        )

    def _gathered_bytes(self, request: Respond, record: RequestRecord) -> int:
        """Return the bytes that a response may take if it is sent whole; raises `BadRequest` if it never fits."""
        needed = cost(request, gathered=record.memory is not None)
        if needed.gathered_bytes > (bytes_max := self.limits.answers_bytes_max):
            raise BadRequest(
                f"an answer of {needed.tokens} tokens in one piece may take {needed.gathered_bytes} bytes of memory,"
                f" and there are {bytes_max} (answers_bytes_max): ask for less, or stream it",
                param=request.params.get("tokens_max", "max_tokens"),
            )
        return needed.gathered_bytes

    def memory_owner(self, key: ClientKey | None) -> str | None:
        """Return the name under which memory is reserved for a key; None for a caller without one."""
        return None if key is None or key is self.keys.anonymous else key.name

    def concurrency_of(self, key: ClientKey) -> float:
        """Return how many generations of one key may be admitted at once."""
        return inf if key is self.keys.anonymous else key.section.concurrency_max or self.limits.key_requests_max

    async def wait_read_turn(self) -> None:
        """Wait for a turn of the event loop in which no other client's many small pieces are read.

        However many clients send small pieces, the tokens of all others wait for one of those clients at a time.
        """
        async with self.reading:
            await trio.lowlevel.checkpoint()

    async def wait_body_turn(self) -> None:
        """Wait for a turn of the event loop in which the next piece of a long body may be read.

        However many clients send images, the tokens of all others wait for a few of those clients at a time.
        """
        async with self.reading_bodies:
            await trio.lowlevel.checkpoint()


def _with_targets(request: Respond, defaults: Targets) -> Respond:
    """Return a request with its own targets, or these where it names none."""
    if defaults == NO_TARGETS:
        return request
    targets = Targets(request.ttft_target_ms, request.itl_target_ms).or_else(defaults)
    return evolve(request, ttft_target_ms=targets.ttft_ms, itl_target_ms=targets.itl_ms)
