"""One HTTP/1.1 connection without I/O: h11 parses each head, and the body's chunks are parsed here.

h11 takes 6 µs for a chunk and this parser 1 µs: a token is a chunk, and the client must use little CPU time beside the
server.
"""

from __future__ import annotations

import re
from typing import Protocol

import h11
import msgspec
from attrs import define, field

from bench.load.faults import RequestFailed
from bench.load.sse import Event, EventStream
from protocol.codec import DECODE_ERRORS

LINE_BYTES_MAX = 8192
ERROR_BYTES_MAX = 64 * 1024
SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")

Headers = list[tuple[bytes, bytes]]


class Body(Protocol):
    """Extracts a body from a connection's bytes."""

    @property
    def done(self) -> bool:
        """Whether all of it has come."""

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that belongs to the body; raises `RequestFailed` if it is no HTTP."""


@define
class Chunked:
    """A body in chunks."""

    done: bool = False
    _rest: bytes = b""
    _left: int = 0  # of the current chunk
    _place: str = "size"  # what comes next: size, data, end (of a chunk) or trailer

    def feed(self, data: bytes) -> bytes:
        """Return the contents of the chunks in `data`."""
        buffer, offset, parts = self._rest + data if self._rest else data, 0, []
        while offset < len(buffer) and not self.done:
            if self._place == "data":
                part = buffer[offset : offset + self._left]
                parts.append(part)
                offset += len(part)
                self._left -= len(part)
                self._place = "data" if self._left else "end"
                continue
            end = buffer.find(b"\r\n", offset)
            if end < 0:
                if len(buffer) - offset > LINE_BYTES_MAX:
                    raise RequestFailed("shape", "not HTTP", "a chunk's head does not end")
                break
            self._line(buffer[offset:end])
            offset = end + 2
        self._rest = buffer[offset:]
        return b"".join(parts)

    def _line(self, line: bytes) -> None:
        if self._place == "size":
            size = line.partition(b";")[0].strip()
            if not SIZE.fullmatch(size):
                raise RequestFailed("shape", "not HTTP", f"{line[:40]!r} is no size of a chunk")
            self._left = int(size, 16)
            self._place = "data" if self._left else "trailer"
        elif self._place == "end":
            if line:
                raise RequestFailed("shape", "not HTTP", "a chunk is longer than it says")
            self._place = "size"
        elif not line:
            self.done = True


@define
class Sized:
    """A body of a known length."""

    _left: int

    @property
    def done(self) -> bool:
        """Whether all of it has come."""
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that belongs to the body."""
        part = data[: self._left]
        self._left -= len(part)
        return part


@define
class UntilClosed:
    """A body that ends with its connection."""

    done: bool = False

    def feed(self, data: bytes) -> bytes:
        """Return `data`."""
        return data


@define
class HttpDialogue:
    """Requests and event streams, one after the other, on one connection."""

    host: bytes
    path: bytes
    headers: Headers
    ready: bool = True  # there is no handshake
    begun: bool = False  # the head of the current answer has come
    finished: bool = True  # the current answer's body has ended
    reusable: bool = True
    closed: RequestFailed | None = None  # only a WebSocket can close together with other events
    outgoing: bytes = b""  # an HTTP client sends only requests
    _head: h11.Connection | None = None
    _status: int = 0
    _body: Body | None = None
    _events: EventStream = field(factory=EventStream)
    _error: bytearray = field(factory=bytearray)

    def hello(self) -> bytes:
        """Return the bytes that open the connection: none."""
        return b""

    def begin(self, body: bytes) -> bytes:
        """Return the bytes of a request with this body."""
        head = self._head = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 * 1024)
        self.begun, self.finished, self._body, self._status = False, False, None, 0
        self._events, self._error = EventStream(), bytearray()
        fixed = [(b"host", self.host), (b"accept", b"text/event-stream"), (b"content-type", b"application/json")]
        headers = [*fixed, *self.headers, (b"content-length", str(len(body)).encode())]
        request = h11.Request(method=b"POST", target=self.path, headers=headers)
        return b"".join(head.send(event) or b"" for event in (request, h11.Data(data=body), h11.EndOfMessage()))

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes; empty `data` is the connection's end.

        Raises `RequestFailed` if the server refuses, sends no HTTP or another content type, or ends too early.
        """
        if not data:
            return self._ended()
        if self._body is None:
            data = self._read_head(data)
        if self._body is None:
            return []
        part = self._body.feed(data)
        self.finished = self._body.done
        if self._status == 200:
            events = self._events.feed(part)
            return events + self._events.end() if self.finished else events
        self._error += part[: ERROR_BYTES_MAX - len(self._error)]
        if self.finished or len(self._error) >= ERROR_BYTES_MAX:
            raise self._refused()
        return []

    def _ended(self) -> list[Event]:
        self.reusable = False
        if isinstance(self._body, UntilClosed) and not self.finished:
            self.finished = True
            if self._status != 200:
                raise self._refused()
            return self._events.end()
        if self._body is not None and self._status != 200:
            raise self._refused()
        raise RequestFailed(
            "truncated" if self.begun else "connection", "closed", "the connection ended before the answer did"
        )

    def _refused(self) -> RequestFailed:
        return http_fault(self._status, bytes(self._error))

    def _read_head(self, data: bytes) -> bytes:
        """Read the answer's head; return what follows it."""
        assert self._head is not None, "the server sent before a request"
        try:
            self._head.receive_data(data)
            while isinstance(event := self._head.next_event(), h11.InformationalResponse):
                pass
        except h11.RemoteProtocolError as error:
            raise RequestFailed("shape", "not HTTP", error) from error
        if not isinstance(event, h11.Response):
            return b""
        headers = dict(event.headers)
        self.begun, self._status = True, event.status_code
        self._body = _body_of(event, headers)
        tokens = {token.strip() for token in headers.get(b"connection", b"").lower().split(b",")}
        self.reusable = (
            not isinstance(self._body, UntilClosed) and b"close" not in tokens and event.http_version >= b"1.1"
        )
        if self._status == 200 and b"json" in headers.get(b"content-type", b""):
            raise RequestFailed("shape", "not a stream", f"the answer is {headers[b'content-type'].decode('latin-1')}")
        return self._head.trailing_data[0]


def _body_of(response: h11.Response, headers: dict[bytes, bytes]) -> Body:
    if response.status_code in {204, 304}:
        return Sized(0)
    if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        return Chunked()
    if b"content-length" in headers:
        return Sized(int(headers[b"content-length"]))  # h11 has seen that it is a number
    return UntilClosed()


def http_fault(status: int, body: bytes) -> RequestFailed:
    """Return the failure that an error response means, by its status and the code in its body."""
    try:
        document = msgspec.json.decode(body)
    except DECODE_ERRORS:
        return RequestFailed("http", status, body.decode(errors="replace"))
    error = document.get("error", document) if isinstance(document, dict) else document
    if not isinstance(error, dict):
        return RequestFailed("http", status, error)
    code = error.get("code") or error.get("type")
    return RequestFailed("http", f"{status} {code}" if code and code != status else status, error.get("message", error))
