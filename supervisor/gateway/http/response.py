"""The response to one HTTP request, written by the handler of a route and ended by the connection.

A response is written into the client's outbox, synchronously, so a token is sent in the turn of its arrival. Every
response ends in one of three ways: it is complete; it is an error response; or it has begun and fails. In the last case
its body is left without an end, so that no client takes it for complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from functools import lru_cache

import h11
import trio
from attrs import define, field

from protocol.dialects import http as shapes
from protocol.errors import InternalError, RequestError, SlowClient, UnsupportedMediaType, UpgradeRequired
from protocol.messages.generation import RouteTaken
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.plain_head import Header
from supervisor.gateway.http.request import ClientLeft, HttpRequest, Unreadable
from supervisor.gateway.http.syntax import HttpSyntax
from supervisor.gateway.memory import ANSWER_BYTES_FREE
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.request_record import RequestRecord
from supervisor.gateway.requests import internal_error

JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would pass events on in lumps of 4 or 8 kB
]
CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"  # as h11 writes it
UNREAD_PIECES_MAX = 64  # of a body that is read only to keep its connection: a piece can be a single byte


@define(eq=False)
class HttpResponse:
    """The response to one request."""

    gateway: Gateway
    outbox: Outbox
    syntax: HttpSyntax
    request: HttpRequest
    closes: bool = False  # the connection closes after this response
    record: RequestRecord | None = None  # of a response by a model; logged when the response is settled
    # The connection can stream server-sent events in chunks that need nothing but their size around them.
    chunked: bool = False
    memory: MemoryReservation = field(init=False)  # for a response that is kept until it is complete
    _begins_at: int = field(init=False)  # the place of the response among all bytes of the outbox
    _unfinished: bool = False  # a part of the body has not been written yet

    def __attrs_post_init__(self) -> None:
        self.memory = self.gateway.memory.answers.reserve(None, ANSWER_BYTES_FREE)
        self._begins_at = self.outbox.accepted_bytes

    @property
    def begun(self) -> bool:
        """Whether the head of the response has been written."""
        return self.syntax.begun

    async def written_by(self, writer: Awaitable[None]) -> None:
        """Await the writer of the response; an error becomes an error response, a lost client ends the response.

        Raises `ClientLeft`.
        """
        try:
            try:
                await writer
            except RequestError as error:
                self.fail(error)
            except Unreadable as unreadable:
                self.fail(unreadable.error, unreadable.status)
            except (ClientLeft, trio.BrokenResourceError):
                raise
            except MemoryError as error:
                # The frames refer to the bytes of the request.
                error.__traceback__ = None
                self.release()
                self.fail_last(internal_error(error, self.request.id, self.request.trace))
            except Exception as bug:  # noqa: BLE001  # `internal_error` logs it
                self.fail(internal_error(bug, self.request.id, self.request.trace))
        except (trio.BrokenResourceError, SlowClient):
            # The client is gone.
            self.syntax.send_failed()
            self.settle(lost=True)
        finally:
            self.settle()

    def release(self) -> None:
        """Give back the memory of the request and its response."""
        self.request.memory.release()
        self.memory.release()

    # A response in one piece ---------------------------------------------------------------

    def reply(self, status: int, headers: list[Header], body: bytes) -> None:
        """Write a complete response, without a body if the method is HEAD or the status 204."""
        if status != 204:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        head_only = self.request.method == "HEAD"
        self.outbox.put(self._head(status, headers) + self._data(b"" if head_only else body) + self._end())

    async def reply_in_pieces(self, status: int, headers: list[Header], size: int, pieces: Iterator[bytes]) -> None:
        """Write a response with a long body, as fast as the client reads, so that it does not fill the backlog."""
        headers = [*headers, (b"content-length", b"%d" % size)]
        data, self._unfinished = self._head(status, headers), True
        for piece in pieces:
            data += self._data(piece)
            await self.outbox.wait_room(len(data))
            self.outbox.put(data)
            data = b""
        if data := data + self._end():
            self.outbox.put(data)
        self._unfinished = False

    async def reply_in_parts(
        self, status: int, headers: list[Header], size: int, first: bytes, read: Callable[[int], Awaitable[bytes]]
    ) -> None:
        """Write a response of `size` bytes, which `read` gets from an offset on, as fast as the client reads.

        Without the bytes that it promises, a body is left without an end.
        """
        head = self._head(status, [*headers, (b"content-length", b"%d" % size)])
        if self.request.method == "HEAD":
            self.outbox.put(head + self._end())
            return
        self._unfinished = True
        self.outbox.put(head)
        data, offset = first, len(first)
        while True:
            await self.outbox.wait_room(len(data))
            self.outbox.put(self._data(data))
            if not data or offset >= size:
                break
            data = (await read(offset))[: size - offset]
            offset += len(data)
        if offset < size:
            raise InternalError("the file has become shorter")
        self.outbox.put(self._end())
        self._unfinished = False

    def fail(self, error: RequestError, status: int | None = None, body: bytes | None = None) -> None:
        """Write an error response, whose body names the error unless it is given.

        If the response has begun, leave its body without an end instead.
        """
        request, status = self.request, status or error.http_status
        self.gateway.access_log.log_refused(
            error,
            request_id=request.id,
            request_line=request.line,
            key=request.key,
            status=status,
            trace=request.trace,
            probe=request.probe,
        )
        if self.begun:
            self.chunked = False
            self.syntax.send_failed()
            return
        headers = [JSON, *shapes.error_headers(error)]
        if isinstance(error, UpgradeRequired):
            headers.append((b"upgrade", b"websocket"))
        if isinstance(error, UnsupportedMediaType):
            headers += [(b"accept", b"application/json"), (b"accept-encoding", b"identity")]
        if request.allow and error.http_status == 405:
            headers.append((b"allow", request.allow))
        self.reply(status, headers, body or shapes.error_body(self.gateway.shown(error, request.key)))

    def fail_last(self, error: RequestError, status: int | None = None) -> None:
        """Write an error response, after which the connection closes."""
        self.closes = True
        self.fail(error, status)

    # A stream of events --------------------------------------------------------------------

    def stream(self, events: bytes) -> None:
        """Write the next server-sent events of a response, with its head before the first."""
        # As h11 does, whose state a chunk does not change; an empty chunk would end the body.
        if self.chunked and events:
            self.outbox.put(b"%x\r\n%b\r\n" % (len(events), events))
        elif self.begun:
            self.outbox.put(self._data(events))
        else:
            head = self._head(200, EVENTS)
            self.outbox.put(head + self._data(events))
            # HTTP/1.0 has no chunks.
            self.chunked = CHUNKED in head

    def begin_stream(self) -> None:
        """Write the head of a stream whose first event is still to come; from then on an error is an event, too."""
        head = self._head(200, EVENTS)
        self.outbox.put(head)
        self.chunked = CHUNKED in head

    def finish(self, events: bytes) -> None:
        """Write the last server-sent events of a response, and its end."""
        head = b"" if self.begun else self._head(200, EVENTS)
        self.outbox.put(head + self._data(events) + self._end())

    def abort_stream(self, events: bytes, error: RequestError) -> None:
        """Write the error event of a response that ends early, and leave its body without an end."""
        if not isinstance(error, SlowClient):
            self.outbox.put(self._data(events))
        elif self.outbox.sent_bytes >= self._begins_at:
            # Else it would cut off an earlier response.
            self.outbox.put_last(self._data(events))
        self.chunked = False
        self.syntax.send_failed()

    # The end -------------------------------------------------------------------------------

    def settle(self, *, lost: bool = False) -> None:
        """Log and count the response once the socket has taken its last byte, or never will.

        `lost` means that its end could not be written; calls after the first do nothing.
        """
        record, self.record = self.record, None
        if record is None:
            return
        outbox, gateway = self.outbox, self.gateway
        begins_at, ends_at = self._begins_at, outbox.accepted_bytes
        lost = lost or self._unfinished

        def on_sent(whole: bool) -> None:
            record.sent_bytes = max(0, min(outbox.sent_bytes, ends_at) - begins_at)
            gateway.runner.settle(record, None if whole and not lost else gateway.cut_reason(outbox))

        outbox.on_sent(on_sent)

    def _all_read(self) -> bool:
        """Whether the next request can be found behind the rest of this one; reads a little of what was received."""
        try:
            for _ in range(UNREAD_PIECES_MAX):
                if not self.syntax.body_unread:
                    return not self.syntax.read_failed
                if not isinstance(self.syntax.next_event(), h11.Data | h11.EndOfMessage):
                    return False
        except h11.RemoteProtocolError:
            pass
        return False

    def _head(self, status: int, headers: list[Header]) -> bytes:
        self._begins_at = self.outbox.accepted_bytes
        headers = [
            (b"date", _date(int(self.gateway.runtime.now()))),
            *headers,
            (b"x-request-id", self.request.id.encode()),
        ]
        record = self.record
        if record is not None and record.route is not None and self.gateway.keys.administers(self.request.key):
            headers.append((b"x-route", _route_header(record.route, record.route_cached_tokens)))
        allowed = self.gateway.origins.cors_headers(self.request.headers)
        headers += [header for header in allowed if header not in headers]
        # An upgrade counts only if `connection` names it (RFC 9110, 7.8).
        options = [name for name, _ in headers if name == b"upgrade"]
        if self.closes or self.gateway.closes_connections or not self._all_read():
            options.append(b"close")
        if options:
            headers.append((b"connection", b", ".join(options)))
        return self.syntax.send_head(status, headers)

    def _data(self, data: bytes) -> bytes:
        return self.syntax.send_data(data)

    def _end(self) -> bytes:
        return self.syntax.send_end()


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def _route_header(route: RouteTaken, cached: int) -> bytes:
    """Return the workers of a response, the prompt tokens expected and found in the prefix cache, and the score."""
    score = "" if route.score is None else f"; score={route.score:.1f}"
    return f"{route.workers}; expected={route.overlap}; cached={cached}{score}".encode("ascii", "replace")
