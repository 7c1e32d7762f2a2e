"""Reads the requests of one HTTP connection: heads, bodies, and what comes ahead of its turn.

h11 knows the syntax; what it would let pass and another reader may understand otherwise, `heads` refuses. All that a
client can make this server wait for or keep has a limit: a head and a body have a time and a size, an idle connection a
time, and what comes while a request is answered a size. The client chooses how small its pieces are, and each of them
costs time here, so clients that send very many take turns.
"""

from __future__ import annotations

import h11
import trio
from attrs import define, field

from protocol.errors import BadRequest, Draining, RequestError, SlowClient, TooLarge
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.exchange import Exchange
from supervisor.gateway.http.head_checks import HEADERS_MAX, VERSIONS, check_head
from supervisor.gateway.outbox import Outbox

AHEAD_BYTES_MAX = 64 * 1024  # of further requests, that are kept while one is being answered
AHEAD_FREE = 4  # requests in a row that came before the answer to the one before them, and wait for nobody
PIECES_A_TURN = 64  # of a body, before others may run: a piece can be a single byte
PIECES_FREE = 4  # that are read without waiting for those who send many
SYNTAX_CHARACTERS_MAX = 200
SHUTS_DOWN = "the server is shutting down"
VERSION_NOT_SUPPORTED, HEAD_TOO_LARGE = 505, 431


class ClientLeft(Exception):
    """The client has closed its sending side, which is leaving."""


class Unreadable(Exception):
    """What came is no request that this server reads; `error` is the answer to it."""

    def __init__(self, error: RequestError, status: int | None = None, request: h11.Request | None = None) -> None:
        super().__init__(error.detail)
        self.error, self.status, self.request = error, status, request


@define(eq=False)
class RequestReader:
    """The reading half of an HTTP connection."""

    outbox: Outbox
    gateway: Gateway
    syntax: h11.Connection = field(init=False)
    overrun: bool = False  # more came ahead than is kept: one more is answered, with the word that it is the last
    more_unread: bool = False  # the client may have sent what nobody will read
    _head: bytearray | None = field(factory=bytearray)  # what has come of this head as it came; None: it is whole
    _idle: trio.CancelScope | None = None
    _deadline: trio.CancelScope | None = None  # of the head or the body that comes now
    _refusing: bool = False
    _requests: int = 0  # that have been answered
    _ahead: int = 0  # requests in a row that have come before the answer to the one before them

    def __attrs_post_init__(self) -> None:
        self.syntax = h11.Connection(h11.SERVER, max_incomplete_event_size=self.gateway.limits.head_bytes_max)

    @property
    def unread(self) -> bool:
        """Whether the client may have more to say than was read."""
        return self.more_unread or self.syntax.their_state in {h11.SEND_BODY, h11.ERROR}

    @property
    def trailing_bytes(self) -> bytes:
        """What has come behind the request that was read last."""
        return bytes(self.syntax.trailing_data[0])

    def drain(self) -> None:
        """Wait no longer for a request of which nothing has come."""
        if self._idle is not None:
            self._idle.cancel(reason="drain")

    def refuse_partial(self) -> None:
        """Wait no longer for the rest of a request."""
        self._refusing = True
        if self._deadline is not None:
            self._deadline.cancel(reason="drain")

    async def head(self) -> h11.Request | None:
        """Return the next request's head, None if there will be none; raises `Unreadable` or `ClientLeft`."""
        limits = self.gateway.limits
        begun = bool(self._head)  # it was sent ahead, behind what has been answered
        with trio.move_on_after(limits.idle_s if self._requests and not begun else limits.head_s) as deadline:
            self._idle, self._deadline = None if begun else deadline, deadline
            event = await self._event()
            if not isinstance(event, h11.Request):
                return None
            try:
                self._check(event)
            except Unreadable:
                self.more_unread = True
                raise
            return event
        if self._head:  # half a head has come; who has asked nothing needs no answer
            raise Unreadable(self._overdue("head", limits.head_s))
        return None

    def _check(self, request: h11.Request) -> None:
        """Raise `Unreadable` for a head that is too long, or that a proxy in front may read otherwise.

        h11 itself looks only at the size of a head that has not come as a whole.
        """
        raw = bytes(self._head or b"")
        raw = raw[: len(raw) - len(self.trailing_bytes)]
        limit, count = self.gateway.limits.head_bytes_max, len(request.headers)
        if len(raw) > limit:
            why = f"the head is {len(raw)} bytes long; at most {limit} are read"
            raise Unreadable(TooLarge(why), HEAD_TOO_LARGE, request)
        if count > HEADERS_MAX:
            why = f"the head has {count} headers; at most {HEADERS_MAX} are read"
            raise Unreadable(TooLarge(why), HEAD_TOO_LARGE, request)
        try:
            check_head(raw, request)
        except BadRequest as error:
            status = None if request.http_version in VERSIONS else VERSION_NOT_SUPPORTED
            raise Unreadable(error, status, request) from error

    async def body(self, exchange: Exchange) -> bytes:
        """Return the request's whole body.

        Raises `TooLarge`, `SlowClient`, `Draining` or `Unreadable`, or `ClientLeft` if it ends early.
        """
        self._head = None
        body, limit, pieces = bytearray(), self.gateway.limits.body_bytes_max, 0
        if (size := exchange.header(b"content-length")) and int(size) > limit:
            raise TooLarge(f"the body is {int(size)} bytes long; at most {limit} are read")
        with trio.move_on_after(self.gateway.limits.body_s) as self._deadline:
            while True:
                event = await self._event()
                if isinstance(event, h11.Data):
                    exchange.body_memory.grow(len(event.data))
                    body += event.data
                    pieces += 1
                    if len(body) > limit:
                        raise TooLarge(f"the body is longer than {limit} bytes")
                    if pieces % PIECES_A_TURN == PIECES_FREE:
                        await self.gateway.wait_read_turn()
                elif isinstance(event, h11.EndOfMessage):  # with trailers perhaps, which mean nothing here
                    return bytes(body)
                else:
                    raise ClientLeft
        raise self._overdue("body", self.gateway.limits.body_s)

    async def next_request(self) -> None:
        """Let others run before a request that was sent ahead; whoever sends many of those waits for others who do.

        A head is short, and may be refused in the turn in which it is read: thousands come in one piece.
        """
        self._requests += 1
        self.syntax.start_next_cycle()
        self._head = bytearray(self.trailing_bytes)
        self._ahead = self._ahead + 1 if self._head else 0
        if self._ahead > AHEAD_FREE:
            await self.gateway.wait_read_turn()
        else:
            await trio.lowlevel.checkpoint()

    async def watch(self, exchange: Exchange, answering: trio.CancelScope) -> None:
        """Notice that the client leaves while it is being answered; keep what it sends ahead, if it is not too much."""
        ahead = len(self.trailing_bytes)
        while True:
            try:
                data = await self.outbox.receive_some()
            except trio.BrokenResourceError:
                break
            if not data:
                break
            ahead += len(data)
            if ahead > AHEAD_BYTES_MAX or self.overrun:  # read on: else it is not noticed that the client leaves
                self.overrun = True
                exchange.closes = exchange.closes or not exchange.begun  # one that has begun cannot say so any more
            else:
                self.syntax.receive_data(bytes(data))
        self.outbox.client_gone = True
        answering.cancel(reason="the client left")

    async def _event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        try:
            while (event := self.syntax.next_event()) is h11.NEED_DATA:
                if self.syntax.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                    self.outbox.put(self.syntax.send(go_on) or b"")
                await self._read()
        except h11.RemoteProtocolError as error:
            raise _unreadable(error) from error
        return event

    async def _read(self) -> None:
        if self.overrun:
            raise ClientLeft  # what follows does not follow what was kept
        data = await self.outbox.receive_some()
        if self._idle is not None:  # from its first byte on a request is no longer idle
            self._idle.deadline = min(self._idle.deadline, trio.current_time() + self.gateway.limits.head_s)
            self._idle = None
        if self._head is not None:
            self._head += data
        self.syntax.receive_data(bytes(data))

    def _overdue(self, part: str, within_s: float) -> RequestError:
        """Return why a request that has come in part is waited for no longer."""
        if self._refusing:
            return Draining(SHUTS_DOWN)
        return SlowClient(f"the {part} did not come within {within_s} s")


def _unreadable(error: h11.RemoteProtocolError) -> Unreadable:
    """Return the answer to what is no HTTP; h11 knows which status says why."""
    sized = TooLarge if error.error_status_hint == HEAD_TOO_LARGE else BadRequest
    why = str(error)[:SYNTAX_CHARACTERS_MAX]  # h11's sentence holds all of an illegal line
    return Unreadable(sized(f"not HTTP as this server reads it: {why}"), error.error_status_hint)
