"""The reading side of one HTTP connection: heads, bodies, and pipelined requests.

`syntax` parses; `head_checks` refuses what another server may read otherwise than h11. Everything that a client can
make this server wait for or store has a limit: a head and a body have a time and a size, an idle connection has a time,
and pipelined requests (received while another is being answered) have a size. The client chooses how small its pieces
are and how long its body, and each piece costs time here, so clients that send very many, or megabytes, take turns.
"""

from __future__ import annotations

import h11
import trio
from attrs import define, field

from protocol.errors import BadRequest, Draining, RequestError, SlowClient, TooLarge
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.head_checks import HEADERS_MAX, VERSIONS, check_head
from supervisor.gateway.http.plain_head import RequestHead
from supervisor.gateway.http.request import ClientLeft, HttpRequest, Unreadable
from supervisor.gateway.http.response import HttpResponse
from supervisor.gateway.http.syntax import Event, HttpSyntax
from supervisor.gateway.outbox import Outbox

PIPELINED_BYTES_MAX = 64 * 1024  # of further requests, that are stored while one is being answered
PIPELINED_FREE = 4  # pipelined requests in a row that are read without waiting for other clients
PIECES_A_TURN = 64  # of a body, before others may run: a piece can be a single byte
PIECES_FREE = 4  # that are read without waiting for other clients that send many
BYTES_FREE = 256 * 1024  # of a body that are read without waiting for other clients that send as much
BYTES_A_TURN = 64 * 1024  # of a longer body, before it is the turn of the next one
SYNTAX_CHARACTERS_MAX = 200
ADVICE = "(gateway.limits.body_bytes_max); images may be named by URLs of allowed hosts"
SHUTS_DOWN = "the server is shutting down"
VERSION_NOT_SUPPORTED, HEAD_TOO_LARGE = 505, 431


@define(eq=False)
class RequestReader:
    """The reading half of an HTTP connection."""

    outbox: Outbox
    gateway: Gateway
    syntax: HttpSyntax = field(init=False)
    overrun: bool = False  # too much was pipelined: the next response is the last, and says so
    more_unread: bool = False  # the client may have sent bytes that will never be read
    more_coming: bool = False  # a request may be on its way from a client that does not know of the connection's end
    answered: int = 0  # requests of this connection
    _head: bytearray | None = field(factory=bytearray)  # the received bytes of the head; None once it is whole
    _idle: trio.CancelScope | None = None
    _idle_since: float = 0.0
    _deadline: trio.CancelScope | None = None  # of the head or the body that is being read
    _refusing: bool = False
    _pipelined: int = 0  # requests in a row that came before the response to the one before them

    def __attrs_post_init__(self) -> None:
        self.syntax = HttpSyntax(self.gateway.limits.head_bytes_max)

    @property
    def unread(self) -> bool:
        """Whether the client may have sent more than was read."""
        return self.more_unread or self.syntax.body_unread or self.syntax.read_failed

    @property
    def trailing_bytes(self) -> bytes:
        """The received bytes behind the last request."""
        return self.syntax.trailing_bytes

    @property
    def begun(self) -> bool:
        """Whether a part of a request has been received, or all of it, that has not been answered."""
        return self._head is None or bool(self._head)

    def drain(self) -> None:
        """Wait no longer than in a drain for a request of which nothing has been received."""
        if self._idle is not None:
            self._idle.deadline = min(self._idle.deadline, self._idle_since + self.gateway.idle_s)

    def refuse_partial(self) -> None:
        """Stop waiting for the rest of a request."""
        self._refusing = True
        self._end_if_refusing()

    def _end_if_refusing(self) -> None:
        """End the wait for the rest of a request, also one that begins once partial requests are refused."""
        if self._refusing and self._deadline is not None:
            self._deadline.cancel(reason="drain")

    async def head(self) -> RequestHead | None:
        """Return the next request's head, None if there will be none; raises `Unreadable` or `ClientLeft`."""
        limits = self.gateway.limits
        # A part of the head was pipelined behind the request before it.
        begun = bool(self._head)
        self._idle_since = trio.current_time()
        with trio.move_on_after(self.gateway.idle_s if self.answered and not begun else limits.head_s) as deadline:
            self._idle, self._deadline = None if begun else deadline, deadline
            self._end_if_refusing()
            event = await self._event()
            if not isinstance(event, RequestHead):
                return None
            try:
                self._check_head(event)
            except Unreadable:
                self.more_unread = True
                raise
            return event
        # A client that has sent nothing needs no response.
        if self._head:
            self.more_unread = True
            raise Unreadable(self._overdue("head", limits.head_s))
        self.more_coming = True
        return None

    def _check_head(self, request: RequestHead) -> None:
        """Raise `Unreadable` for a head that is too long, or could be read otherwise by a proxy in front.

        h11 itself checks only the size of a head that has not been received as a whole.
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
        if self.syntax.plain:
            # No other parser could read a plain head in another way.
            return
        try:
            check_head(raw, request)
        except BadRequest as error:
            status = None if request.http_version in VERSIONS else VERSION_NOT_SUPPORTED
            raise Unreadable(error, status, request) from error

    async def body(self, request: HttpRequest) -> bytes:
        """Return the request's whole body.

        Raises `TooLarge`, `SlowClient`, `Draining` or `Unreadable`, or `ClientLeft` if it ends early.
        """
        self._head = None
        body, limit, pieces, turn_at = bytearray(), self.gateway.limits.body_bytes_max, 0, BYTES_FREE
        if (size := request.header(b"content-length")) and int(size) > limit:
            raise TooLarge(f"the body is {int(size)} bytes long; at most {limit} are read {ADVICE}")
        if (whole := self.syntax.take_body()) is not None:
            request.memory.grow(len(whole))
            return whole
        with trio.move_on_after(self.gateway.limits.body_s) as self._deadline:
            self._end_if_refusing()
            while True:
                event = await self._event()
                if isinstance(event, h11.Data):
                    request.memory.grow(len(event.data))
                    body += event.data
                    pieces += 1
                    if len(body) > limit:
                        raise TooLarge(f"the body is longer than {limit} bytes {ADVICE}")
                    if pieces % PIECES_A_TURN == PIECES_FREE:
                        await self.gateway.turns.wait_read()
                    if len(body) >= turn_at:
                        turn_at = len(body) + BYTES_A_TURN
                        await self.gateway.turns.wait_body()
                elif isinstance(event, h11.EndOfMessage):
                    # Trailers are ignored.
                    return bytes(body)
                else:
                    raise ClientLeft
        raise self._overdue("body", self.gateway.limits.body_s)

    async def next_request(self) -> None:
        """Let other clients run before the next request; clients that pipeline many requests take turns.

        A head is short, and may be refused in the turn in which it is read: thousands can come in one piece.
        """
        self.answered += 1
        self.syntax.start_next_cycle()
        self._head = bytearray(self.trailing_bytes)
        self._pipelined = self._pipelined + 1 if self._head else 0
        if self._pipelined > PIPELINED_FREE:
            await self.gateway.turns.wait_read()
        else:
            await trio.lowlevel.checkpoint()

    async def watch(self, response: HttpResponse, answering: trio.CancelScope) -> None:
        """Cancel `answering` when the client leaves; store the requests that it pipelines, up to a limit."""
        pipelined_bytes = len(self.trailing_bytes)
        while True:
            try:
                data = await self.outbox.receive_some()
            except trio.BrokenResourceError:
                break
            if not data:
                break
            pipelined_bytes += len(data)
            # Beyond the limit it reads on, to notice when the client leaves.
            if pipelined_bytes > PIPELINED_BYTES_MAX or self.overrun:
                self.overrun = True
                # A head that has been sent did not announce the end of the connection.
                response.closes = response.closes or not response.begun
            else:
                self.syntax.receive_data(bytes(data))
        self.outbox.client_gone = True
        answering.cancel(reason="the client left")

    async def _event(self) -> Event:
        try:
            while (event := self.syntax.next_event()) is h11.NEED_DATA:
                if self.syntax.awaits_continue:
                    self.outbox.put(self.syntax.send_continue())
                await self._read()
        except h11.RemoteProtocolError as error:
            raise _unreadable(error) from error
        return event

    async def _read(self) -> None:
        if self.overrun:
            # Bytes before these were discarded.
            raise ClientLeft
        data = await self.outbox.receive_some()
        # From its first byte on a request is no longer idle.
        if self._idle is not None:
            if self.answered:
                self._idle.deadline = trio.current_time() + self.gateway.limits.head_s
            self._idle = None
        if self._head is not None:
            self._head += data
        self.syntax.receive_data(bytes(data))

    def _overdue(self, part: str, within_s: float) -> RequestError:
        """Return the error for a request of which only a part was received in time, or before the server shut down."""
        if self._refusing:
            return Draining(SHUTS_DOWN)
        return SlowClient(f"the {part} did not come within {within_s} s")


def _unreadable(error: h11.RemoteProtocolError) -> Unreadable:
    """Return the error for bytes that are no HTTP, with the status suggested by h11."""
    error_type = TooLarge if error.error_status_hint == HEAD_TOO_LARGE else BadRequest
    why = str(error)[:SYNTAX_CHARACTERS_MAX]  # h11 quotes an illegal line as a whole
    return Unreadable(error_type(f"not HTTP as this server reads it: {why}"), error.error_status_hint)
