"""What all connections of a gateway share: the limits, who may knock, and the drain."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Annotated, Protocol, TypeVar

import trio
from attrs import define, evolve, field, frozen

from actors.kit.offload import Offload, RunInThread, run_inline
from actors.processor import TextReply
from protocol.cost import cost, generations_of, multiplying_field
from protocol.dialects.options import Within
from protocol.dialects.request_body import reading_work
from protocol.errors import BadRequest, Draining, Forbidden, NotFound, RequestError, StartFailed
from protocol.grammars import kinds
from protocol.messages import Grammar, GrammarKind
from protocol.text_messages import Answered, Respond
from protocol.trace import Trace
from supervisor.config.keyfile import clamp_priority
from supervisor.config.tls import Certificate
from supervisor.files.reading import FileReader
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.http.head_checks import authority, same_origin
from supervisor.gateway.keys import Headers, Key, Keys
from supervisor.gateway.memory_budgets import MemoryBudget
from supervisor.gateway.outbox import Backlogs, Outbox
from supervisor.gateway.requests import RequestRecord, RequestRunner, ServedModel
from supervisor.gateway.websocket.history import ResponseHistories
from supervisor.sockets.descriptor_reserve import Reserve
from supervisor.sockets.unauthenticated import UnauthenticatedConnections

log = logging.getLogger(__name__)

Seconds = Annotated[float, Within(above=0, at_most=1_000_000)]
Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]
Header = tuple[bytes, bytes]
T = TypeVar("T")

WILDCARD = "*"
METHODS = b"GET, HEAD, POST, OPTIONS"
EXPOSED = b"x-request-id, retry-after, x-should-retry"  # what a page may read beside the few headers that it always may
ASKED_HEADERS = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
PREFLIGHT_S = 600
ENDING_A_TURN = 4  # of hundreds of connections that end together: nobody else's tokens may wait for all of them


@frozen
class GatewayLimits:
    """Every limit of the doors; a full one is a clear error or a clear close code."""

    connections_max: Count = 1024
    address_connections_max: Count = 256  # of one address that have presented no key; this host's own do not count
    key_connections_max: Count = 256  # of one key that names no number of its own
    key_requests_max: Count = 192  # generations of one key inside at once; beyond that its requests wait
    head_bytes_max: Count = 32 * 1024
    body_bytes_max: Count = 4 * 1024 * 1024  # of an HTTP request, or of one WebSocket message
    backlog_bytes_max: Count = 1024 * 1024  # that a client has not read yet
    send_buffer_bytes: Count = 256 * 1024  # in the kernel, beside the backlog
    websocket_queue_max: Count = (
        16  # responses that wait for their turn on one WebSocket, and messages that wait to be read
    )
    websocket_lanes_max: Count = 32  # of one WebSocket
    websocket_running_max: Count = 16  # responses that are being answered at once on one WebSocket
    history_bytes_max: Count = 8 * 1024 * 1024  # of conversations that one WebSocket can continue
    # Of all clients together, whatever each connection may have: a gateway of 1 GB survives all of them full.
    bodies_bytes_max: Count = 64 * 1024 * 1024  # of requests that are being read or answered
    answers_bytes_max: Count = 256 * 1024 * 1024  # of answers that are kept until they are whole
    key_share_max: Annotated[float, Within(above=0, at_most=1)] = 0.75  # of each of these two, that one key may hold
    histories_bytes_max: Count = 128 * 1024 * 1024  # that can be continued
    backlogs_bytes_max: Count = 128 * 1024 * 1024  # that clients have not read yet
    head_s: Seconds = 10.0
    body_s: Seconds = 30.0
    idle_s: Seconds = 75.0  # between two requests of one HTTP connection
    websocket_idle_s: Seconds = 900.0  # that nothing is said on a WebSocket, and nothing answered
    stall_s: Seconds = 30.0  # that a client with a backlog may read nothing
    close_s: Seconds = 2.0
    websocket_s_max: Seconds = 3600.0  # of one WebSocket


def _unknown() -> dict[str, object]:
    raise NotFound("this server does not tell about itself")


async def _nothing_to_flush() -> None:
    await trio.lowlevel.checkpoint()
    raise NotFound("there is no cache here that could be flushed")


class Drainable(Protocol):
    """A connection that can be told to end when it is idle."""

    @property
    def busy(self) -> bool:
        """Whether anything is being answered."""

    def drain(self) -> None:
        """End as soon as nothing is being answered."""

    def cut(self) -> None:
        """Refuse what has come in part."""


@define(eq=False)
class Gateway:
    """One gateway's connections and what they need."""

    asking: RequestRunner
    gate: AdmissionGate
    limits: GatewayLimits
    names: frozenset[str]  # that clients may call this server by, without the port; `*` is any
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
    paths: frozenset[str] | None = None  # that are served here; None: every one
    origins: frozenset[str] = frozenset()  # of foreign pages that may use this server; `*` is any
    grammars: frozenset[str] = frozenset(GrammarKind)  # that requests may use whose key does not say which
    port: int | None = None  # once the gateway listens
    connections: dict[Outbox, Drainable] = field(factory=dict)  # one each, whatever it speaks by now
    reserve: Reserve = field(factory=Reserve)  # of descriptors, which no connection takes
    bodies: MemoryBudget = field(init=False)
    answers: MemoryBudget = field(init=False)
    histories: ResponseHistories = field(init=False)
    backlogs: Backlogs = field(init=False)
    ending: trio.Semaphore = field(factory=lambda: trio.Semaphore(ENDING_A_TURN))
    reading: trio.Semaphore = field(factory=lambda: trio.Semaphore(1))  # many small pieces of what a client says
    strangers: UnauthenticatedConnections[Outbox] = field(factory=UnauthenticatedConnections)
    _owners: dict[Outbox, Key] = field(factory=dict)  # in whose name a connection is counted
    _left: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        answers, share = "answers in one piece (answers_bytes_max)", lambda: self.limits.key_share_max
        self.bodies = MemoryBudget("requests (bodies_bytes_max)", lambda: self.limits.bodies_bytes_max, share)
        self.answers = MemoryBudget(answers, lambda: self.limits.answers_bytes_max, share)
        self.histories = ResponseHistories(lambda: self.limits.histories_bytes_max)
        self.backlogs = Backlogs(lambda: self.limits.backlogs_bytes_max)

    # Who knocks --------------------------------------------------------------------------

    def check_caller(self, headers: Headers) -> None:
        """Raise `Forbidden` for a foreign `Host` or `Origin`: any web page can make a browser knock at localhost."""
        given = dict(headers)  # of what must not stand twice nothing does
        host = given.get(b"host", b"").decode("latin-1")
        named = authority(host)
        if named is None or not (WILDCARD in self.names or named.host in self.names):
            raise Forbidden(f"this server does not answer to the host {host[:256]!r}")
        if b"origin" not in given and given.get(b"sec-fetch-site") == b"cross-site":
            raise Forbidden("other sites' pages may not use this server")  # an image, say, comes without an `Origin`
        origin = given.get(b"origin", b"").decode("latin-1")
        own = named.host in self.names and same_origin(origin, named)
        if b"origin" in given and not (own or self._welcome(origin)):
            raise Forbidden(f"pages of {origin[:256]!r} may not use this server")

    def let_in(self, outbox: Outbox, headers: Headers) -> None:
        """Let a request in that needs no key; raises `Forbidden`. It makes no stranger known where keys are wanted."""
        self.check_caller(headers)
        if not self.keys.wanted:
            self.strangers.remove(outbox)

    def serves(self, path: str) -> bool:
        """Whether anything can answer here at this path."""
        return self.paths is None or path in self.paths

    def authenticate(self, headers: Headers, *, admin: bool = False) -> Key:
        """Return the key of a request; raises `Unauthorized`, or `Forbidden` where only an admin's key will do."""
        return self.keys.find(headers, admin=admin)

    def knock(self, outbox: Outbox, headers: Headers, *, admin: bool = False) -> Key:
        """Return the key of a request that comes over this connection, which from now on is counted as the key's.

        Raises `Forbidden`, `Unauthorized`, or `ConcurrencyLimited` if the key has too many connections.
        """
        self.check_caller(headers)
        key = self.authenticate(headers, admin=admin)
        self.strangers.remove(outbox)
        owner = self._owners.get(outbox)
        if key is not owner and key is not self.keys.anybody:
            key.connect(self.limits.key_connections_max)
            if owner is not None:
                owner.connections -= 1
            self._owners[outbox] = key
        return key

    def cors_headers(self, headers: Headers) -> list[Header]:
        """Return what lets a page of a welcome origin read an answer; credentials of a browser are never asked for."""
        if not self.origins:
            return []
        origin = dict(headers).get(b"origin")
        vary = (b"vary", b"origin")  # to whoever keeps answers: another origin's would be another one
        if origin is None or not self._welcome(origin.decode("latin-1")):
            return [vary]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), vary]

    def preflight(self, headers: Headers) -> list[Header] | None:
        """Return the headers of the answer to a browser's question ahead, None if it is none or not welcome."""
        given = dict(headers)
        asked = given.get(b"access-control-request-headers", b"")
        if b"access-control-request-method" not in given or not self._welcome(
            given.get(b"origin", b"").decode("latin-1")
        ):
            return None
        answer = [
            *self.cors_headers(headers),
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_S),
        ]
        if ASKED_HEADERS.fullmatch(asked):  # `*` would not cover `authorization`
            answer.append((b"access-control-allow-headers", asked))
        if given.get(b"access-control-request-private-network") == b"true":
            answer.append((b"access-control-allow-private-network", b"true"))
        return answer

    def _welcome(self, origin: str) -> bool:
        return bool(origin) and (WILDCARD in self.origins or origin.lower() in self.origins)

    # What is told of them ----------------------------------------------------------------

    def refused(
        self,
        error: RequestError,
        *,
        request_id: str,
        what: str,
        key: Key | None = None,
        status: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Tell the access log and the metrics of an error, unless `answer` raised it, which has told already."""
        name = "-" if key is None else key.name
        self.asking.access.refused(error, request_id=request_id, what=what, key=name, status=status, trace=trace)

    def noted(
        self, request_id: str, what: str, status: int, key: Key | None, asked_at: float, trace: Trace | None = None
    ) -> None:
        """Tell the access log of a request that no model was asked for."""
        name = "-" if key is None else key.name
        self.asking.access.noted(request_id, what, status, name, trio.current_time() - asked_at, trace)

    # What becomes of them ----------------------------------------------------------------

    def make_room(self, address: str) -> bool:
        """Make room for a connection from an address, where strangers stand in its way, and return whether there is."""
        limits, ended = self.limits, None
        if address and self.strangers.of(address) >= limits.address_connections_max:
            ended = self.strangers.close_oldest(address)
        elif len(self.connections) >= limits.connections_max and (ended := self.strangers.close_oldest()) is None:
            return False
        if ended is not None:
            self.forget(ended)
            self.asking.metrics.client_dropped("stranger")
        return len(self.connections) < limits.connections_max

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
        for connection in tuple(self.connections.values()):
            connection.drain()

    def cut_reason(self, outbox: Outbox) -> str:
        """Return why a client has not got all of an answer: it read too slowly, it left, or a drain's time was over."""
        return outbox.dropped or ("drain" if self.gate.draining and outbox.let_go else "left")

    def cut(self) -> int:
        """End every answer that still runs with a retryable error, and return how many there were.

        Requests that have come in part hear the same: the rest of them would be refused.
        """
        for connection in tuple(self.connections.values()):
            connection.cut()
        return self.asking.cut_all(Draining("the server is shutting down"))

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
        key = counted.key or self.keys.anybody
        priority = clamp_priority(request.priority, key.section.priority)
        weight, param = generations_of(request), multiplying_field(request)
        with self.asking.counting(counted), key.asking(weight, param):
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
                answered = await self.asking.answer(request, served, counted, into)
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
        who = "requests here" if key is self.keys.anybody else f"the key {key.name!r}"
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
        return None if key is None or key is self.keys.anybody else key.name

    def concurrency_of(self, key: Key) -> float:
        """Return how many generations may be inside the gate in the name of one key."""
        return inf if key is self.keys.anybody else key.section.concurrency_max or self.limits.key_requests_max

    async def wait_turn(self) -> None:
        """Wait until no other client has many small pieces read in this turn of the event loop.

        However many clients send nothing else, everybody else waits for one of them at a time.
        """
        async with self.reading:
            await trio.lowlevel.checkpoint()

    def forget(self, outbox: Outbox) -> None:
        """Note that a connection has ended, or will as soon as it runs."""
        self.connections.pop(outbox, None)
        self.strangers.remove(outbox)
        if (key := self._owners.pop(outbox, None)) is not None:
            key.connections -= 1
        self._left.unpark_all()

    async def wait_idle(self) -> None:
        """Wait until nobody is being answered or has a backlog: in a drain, connections end with their answers."""
        await trio.lowlevel.checkpoint()
        while any(connection.busy or outbox.backlog_bytes for outbox, connection in self.connections.items()):
            await self._left.park()

    async def wait_closed(self) -> None:
        """Wait until every connection has ended."""
        await trio.lowlevel.checkpoint()
        while self.connections:
            await self._left.park()
