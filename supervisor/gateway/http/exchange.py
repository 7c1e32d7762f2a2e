"""One HTTP request and its response, as a route sees them.

A response is written into the client's outbox, synchronously, so that a token is sent in the turn in which
it comes. A response that has begun cannot become an error response: if it fails then, its body is left without its end,
so that no client takes it for complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import lru_cache, partial
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import h11
import trio
from attrs import define, field

from actors.kit.offload import Offload
from protocol.dialects import http as shapes
from protocol.dialects.request_body import reading_work
from protocol.dialects.targets import NO_TARGETS, targets_of
from protocol.errors import RequestError, SlowClient, UnsupportedMediaType, UpgradeRequired
from protocol.messages.generation import RouteTaken
from protocol.openapi.document import Operation
from protocol.trace import Trace, child_span, from_headers
from supervisor.gateway.access_log import REQUEST_LINE_CHARACTERS_MAX
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.heads.plain_head import Header, RequestHead
from supervisor.gateway.http.syntax import HttpSyntax
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import RequestRecord

T = TypeVar("T")

JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"  # as h11 writes it
JSON_OBJECT = re.compile(rb"[\t\n\v\f\r ]*+\{")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")  # safe in any log and any shell
QUERY_FIELDS_MAX = 32
UNREAD_PIECES_MAX = 64  # of a body that is read only to keep its connection: a piece can be a single byte
BODY_BYTES_FREE = 16 * 1024  # of each body, so that small requests are read when the budget is used up


@define(eq=False)
class Body:
    """The body of a request, kept until it has been parsed: from then on its texts and images exist on their own."""

    data: bytes

    def take(self) -> bytes:
        """Return the bytes, and forget them."""
        data, self.data = self.data, b""
        return data


@define(eq=False)
class Exchange:
    """One HTTP request and its response; `request` is None if the bytes could not be parsed."""

    gateway: Gateway
    outbox: Outbox
    syntax: HttpSyntax
    request: RequestHead | None = None  # None: it could not be parsed, or did not come
    operations: tuple[Operation, ...] = ()  # of all routes of this server, for the OpenAPI document
    key: ClientKey | None = None  # once the caller is authorized
    allow: bytes = b""  # the methods of its path, once that is found
    probe: bool = False  # its route is called by monitors every few seconds
    closes: bool = False  # the connection closes after this response
    request_id: str = ""
    received_at: float = 0.0
    caller: Trace | None = None  # the span of the client, from its headers
    trace: Trace | None = None
    _begins_at: int = 0  # the place of the response among all bytes of the outbox
    body_memory: MemoryReservation = field(init=False)
    answer_memory: MemoryReservation = field(init=False)
    _record: RequestRecord | None = None
    _unfinished: bool = False  # a part of the body has not been written yet
    _chunked: bool = False  # the body of a stream has begun, in chunks

    def __attrs_post_init__(self) -> None:
        self.received_at = trio.current_time()
        self._begins_at = self.outbox.accepted_bytes
        self.body_memory = self.gateway.bodies.reserve(None, BODY_BYTES_FREE)
        self.answer_memory = self.gateway.answers.reserve(None)
        self.request_id = self._client_request_id() or self.gateway.new_id()
        if self.request is not None:
            self.caller = from_headers(self.headers)
            self.trace = child_span(self.caller, self.gateway.new_id())

    def set_key(self, key: ClientKey) -> None:
        """Set the caller's key, by which memory is reserved from now on."""
        self.key = key
        self.body_memory.owner = self.answer_memory.owner = self.gateway.memory_owner(key)

    def release(self) -> None:
        """Give back the memory of the request and its response."""
        self.body_memory.release()
        self.answer_memory.release()

    # The request -----------------------------------------------------------------------------

    @property
    def headers(self) -> tuple[Header, ...]:
        """The headers of the request, their names in lower case."""
        return () if self.request is None else self.request.headers

    def header(self, name: bytes) -> bytes:
        """Return the values of a header, joined as HTTP joins them; empty if it is not there."""
        return b"" if self.request is None else self.request.values.get(name, b"")

    @property
    def method(self) -> str:
        """The method of the request."""
        return "" if self.request is None else self.request.method.decode("latin-1")

    @property
    def path(self) -> str:
        """The path of the request target, without the query; `*` is the server as a whole."""
        target = b"" if self.request is None else self.request.target
        if not target.startswith((b"http://", b"https://")):
            return target.decode("latin-1").partition("?")[0]
        try:  # a client that uses this server as a proxy sends a whole URL
            return urlsplit(target.decode("latin-1")).path or "/"
        except ValueError:
            return ""

    def query(self, name: str) -> str | None:
        """Return the first value of a query parameter, None if there is none."""
        target = "" if self.request is None else self.request.target.decode("latin-1")
        try:
            return parse_qs(target.partition("?")[2], max_num_fields=QUERY_FIELDS_MAX).get(name, [None])[0]
        except ValueError:
            return None

    @property
    def request_line(self) -> str:
        """The method and the path, for logs; the query is left out, since it may be secret."""
        return "connection" if self.request is None else f"{self.method} {self.path}"[:REQUEST_LINE_CHARACTERS_MAX]

    def start_record(self, model: str, api: str) -> RequestRecord:
        """Return a new record for a response by a model, which `settle` logs; raises `BadRequest` for wrong targets."""
        key = self.key or self.gateway.keys.anonymous
        self._record = RequestRecord(
            self.request_id,
            model,
            api,
            self.received_at,
            key=key,
            request_line=self.request_line,
            trace=self.trace,
            targets=NO_TARGETS if self.request is None else targets_of(self.request.values),
            settles=False,
        )
        return self._record

    def settle(self, *, lost: bool = False) -> None:
        """Log and count the response once the socket has taken its last byte, or never will.

        `lost` means that its end could not be written; calls after the first do nothing.
        """
        record, self._record = self._record, None
        if record is None:
            return
        outbox, gateway = self.outbox, self.gateway
        begins_at, ends_at = self._begins_at, outbox.accepted_bytes
        lost = lost or self._unfinished

        def on_sent(whole: bool) -> None:
            record.sent_bytes = max(0, min(outbox.sent_bytes, ends_at) - begins_at)
            gateway.runner.settle(record, None if whole and not lost else gateway.cut_reason(outbox))

        outbox.on_sent(on_sent)

    async def read(self, parse: Callable[[bytes], T], body: Body) -> T:
        """Return the parsed body; raises the `RequestError` that lists its mistakes."""
        return await self.offload(reading_work(body.data), partial(parse, body.take()))

    async def offload(self, size: int, function: Callable[[], T]) -> T:
        """Return the result of `function`, run in a thread if `size` is large; keys take turns in using the threads."""
        key = self.key or self.gateway.keys.anonymous
        return await Offload(self.gateway.run_in_thread, key.name).run(size, function)

    def check_media(self) -> None:
        """Raise `UnsupportedMediaType` if the headers say that the body is encoded, or is not JSON."""
        if (coding := self.header(b"content-encoding").strip().lower()) not in {b"", b"identity"}:
            raise UnsupportedMediaType(f"the body is encoded as {_short(coding)}; send it unencoded")
        media = self._media_type()
        accepted = media in {b"", b"application/json", b"text/json", b"application/x-www-form-urlencoded"}
        if not accepted and not (media.startswith(b"application/") and media.endswith(b"+json")):
            raise UnsupportedMediaType(f"the body is {_short(media)}; send application/json")

    def check_form(self, body: Body) -> None:
        """Raise `UnsupportedMediaType` for a form, unless it is JSON: many clients label that as a form by default."""
        if self._media_type() == b"application/x-www-form-urlencoded" and not JSON_OBJECT.match(body.data):
            raise UnsupportedMediaType("the body is a form; send application/json")

    # The response ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the head of the response has been written."""
        return self.syntax.begun

    @property
    def chunked(self) -> bool:
        """Whether the body of a stream has begun, in chunks that need nothing but their size around them."""
        return self._chunked

    def reply(self, status: int, headers: list[Header], body: bytes) -> None:
        """Write a complete response, without a body if the method is HEAD or the status 204."""
        if status != 204:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        head_only = self.method == "HEAD"
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

    def stream(self, events: bytes) -> None:
        """Write the next server-sent events of a response, with its head before the first."""
        if (
            self._chunked and events
        ):  # as h11 does, whose state a chunk does not change; an empty one would end the body
            self.outbox.put(b"%x\r\n%b\r\n" % (len(events), events))
        elif self.begun:
            self.outbox.put(self._data(events))
        else:
            head = self._head(200, EVENTS)
            self.outbox.put(head + self._data(events))
            self._chunked = CHUNKED in head  # HTTP/1.0 has no chunks

    def finish(self, events: bytes) -> None:
        """Write the last server-sent events of a response, and its end."""
        head = b"" if self.begun else self._head(200, EVENTS)
        self.outbox.put(head + self._data(events) + self._end())

    def abort_stream(self, events: bytes, error: RequestError) -> None:
        """Write the error event of a response that ends early, and leave its body without an end."""
        if not isinstance(error, SlowClient):
            self.outbox.put(self._data(events))
        elif self.outbox.sent_bytes >= self._begins_at:  # or it would cut off an earlier response
            self.outbox.put_last(self._data(events))
        self._chunked = False
        self.syntax.send_failed()

    def fail(self, error: RequestError, status: int | None = None) -> None:
        """Write an error response; if the response has begun, leave its body without an end instead."""
        status = status or error.http_status
        self.gateway.access_log.log_refused(
            error,
            request_id=self.request_id,
            request_line=self.request_line,
            key=self.key,
            status=status,
            trace=self.trace,
            probe=self.probe,
        )
        if self.begun:
            self._chunked = False
            self.syntax.send_failed()
            return
        headers = [JSON, *shapes.error_headers(error)]
        if isinstance(error, UpgradeRequired):
            headers.append((b"upgrade", b"websocket"))
        if isinstance(error, UnsupportedMediaType):
            headers += [(b"accept", b"application/json"), (b"accept-encoding", b"identity")]
        if self.allow and error.http_status == 405:
            headers.append((b"allow", self.allow))
        self.reply(status, headers, shapes.error_body(error))

    def all_read(self) -> bool:
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

    # --------------------------------------------------------------------------------------------

    def _head(self, status: int, headers: list[Header]) -> bytes:
        self._begins_at = self.outbox.accepted_bytes
        headers = [(b"date", _date(int(self.gateway.now()))), *headers, (b"x-request-id", self.request_id.encode())]
        if self._record is not None and self._record.route is not None:
            headers.append((b"x-route", _route_header(self._record.route, self._record.route_cached_tokens)))
        headers += [header for header in self.gateway.origins.cors_headers(self.headers) if header not in headers]
        options = [name for name, _ in headers if name == b"upgrade"]  # it counts only if named here (RFC 9110, 7.8)
        if self.closes or self.gateway.closes_connections or not self.all_read():
            options.append(b"close")
        if options:
            headers.append((b"connection", b", ".join(options)))
        return self.syntax.send_head(status, headers)

    def _data(self, data: bytes) -> bytes:
        return self.syntax.send_data(data)

    def _end(self) -> bytes:
        return self.syntax.send_end()

    def _client_request_id(self) -> str | None:
        """Return the request id that the client sent, None if it sent none that is safe in a log."""
        request_id = self.header(b"x-request-id")
        return request_id.decode() if REQUEST_ID.fullmatch(request_id) is not None else None

    def _media_type(self) -> bytes:
        return self.header(b"content-type").partition(b";")[0].strip().lower()


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def _route_header(route: RouteTaken, cached: int) -> bytes:
    """Return the workers of a response, the prompt tokens expected and found in the prefix cache, and the score."""
    score = "" if route.score is None else f"; score={route.score:.1f}"
    return f"{route.workers}; expected={route.overlap}; cached={cached}{score}".encode("ascii", "replace")


def _short(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))
