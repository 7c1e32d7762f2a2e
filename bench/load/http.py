"""One HTTP/1.1 connection without I/O: h11 parses all but the chunks of a stream, which are parsed here.

h11 takes 6 µs for a chunk and this parser 1 µs: a token is a chunk, and the client must use little CPU time beside the
server.
"""

from __future__ import annotations

import re

import h11
import msgspec
from attrs import define, field

from bench.load.messages import Kind, RequestFailed
from protocol.link.codec import DECODE_ERRORS

LINE_BYTES_MAX = 8192
ERROR_BYTES_MAX = 64 * 1024
EVENT_BYTES_MAX = 32 * 1024 * 1024
MARK = b"\xef\xbb\xbf"  # of UTF-8, which may stand before the first line
SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")

Headers = list[tuple[bytes, bytes]]
Event = tuple[bytes, bytes]  # its name, empty if it has none, and its data


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
class EventStream:
    """A parser of server-sent events, for bytes that are cut anywhere. Comments, ids and retry times are ignored."""

    _rest: list[bytes] = field(factory=list)  # of a line that has begun, in parts: together they may be megabytes
    _rest_size: int = 0
    _name: bytes = b""
    _data: list[bytes] = field(factory=list)
    _size: int = 0

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes; raises `RequestFailed` at one that is too long."""
        # A carriage return at the end may be half of a line's end.
        continues = b"\n" not in data and b"\r" not in data and not (self._rest and self._rest[-1].endswith(b"\r"))
        if continues:
            self._keep(data)
            events = []
        else:
            buffer = b"".join([*self._rest, data])
            cut = max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, max(len(buffer) - 1, 0))) + 1
            self._rest, self._rest_size = [], 0
            self._keep(buffer[cut:])
            events = self._lines(buffer[:cut].splitlines())
        if self._size + self._rest_size > EVENT_BYTES_MAX:
            raise RequestFailed("shape", "an event that does not end", f"after {EVENT_BYTES_MAX} bytes")
        return events

    def end(self) -> list[Event]:
        """Return the event that lacked only its blank line when the stream ended; an unfinished line is dropped."""
        rest = b"".join(self._rest)
        return self._lines([*([rest[:-1]] if rest.endswith(b"\r") else []), b""])

    def _keep(self, part: bytes) -> None:
        if part:
            self._rest.append(part)
            self._rest_size += len(part)

    def _lines(self, lines: list[bytes]) -> list[Event]:
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                value = line[6:] if line[5:6] == b" " else line[5:]
                self._data.append(value)
                self._size += len(value)
            elif not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                    self._data.clear()
                self._name, self._size = b"", 0
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif line.startswith(MARK):
                events += self._lines([line[len(MARK) :]])
        return events


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
    _parser: h11.Connection = field(factory=lambda: h11.Connection(h11.CLIENT))
    _status: int = 0
    _chunks: Chunked | None = None  # of a stream in chunks, once its head has come; h11 reads all else
    _events: EventStream = field(factory=EventStream)
    _error: bytearray = field(factory=bytearray)

    def hello(self) -> bytes:
        """Return the bytes that open the connection: none."""
        return b""

    def begin(self, body: bytes) -> bytes:
        """Return the bytes of a request with this body."""
        parser = self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 * 1024)
        self.begun, self.finished, self._chunks, self._status = False, False, None, 0
        self._events, self._error = EventStream(), bytearray()
        fixed = [(b"host", self.host), (b"accept", b"text/event-stream"), (b"content-type", b"application/json")]
        headers = [*fixed, *self.headers, (b"content-length", str(len(body)).encode())]
        request = h11.Request(method=b"POST", target=self.path, headers=headers)
        return b"".join(parser.send(event) or b"" for event in (request, h11.Data(data=body), h11.EndOfMessage()))

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes; empty `data` is the connection's end.

        Raises `RequestFailed` if the server refuses, sends no HTTP or another content type, or ends too early.
        """
        if data and self._chunks is not None:
            return self._read_chunks(self._chunks, data)
        if not data:
            self.reusable = False
        try:
            self._parser.receive_data(data)
            return self._read()
        except h11.RemoteProtocolError as error:
            if data:
                raise RequestFailed("shape", "not HTTP", error) from error
        kind: Kind = "truncated" if self.begun else "connection"
        raise RequestFailed(kind, "closed", "the connection ended before the answer did")

    def _read_chunks(self, chunks: Chunked, data: bytes) -> list[Event]:
        events = self._events.feed(chunks.feed(data))
        self.finished = chunks.done
        return events + self._events.end() if self.finished else events

    def _read(self) -> list[Event]:
        """Read what the parser has of the answer."""
        events: list[Event] = []
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Response):
                self._read_head(event, dict(event.headers))
                if self._chunks is not None:
                    return self._read_chunks(self._chunks, self._parser.trailing_data[0])
            elif isinstance(event, h11.Data) and self._status == 200:
                events += self._events.feed(bytes(event.data))
            elif isinstance(event, h11.Data):
                self._error += event.data[: ERROR_BYTES_MAX - len(self._error)]
            elif isinstance(event, h11.EndOfMessage):
                self.finished = True
                if self._status != 200:
                    raise http_fault(self._status, bytes(self._error))
                return events + self._events.end()
            elif not isinstance(event, h11.InformationalResponse):
                return events

    def _read_head(self, response: h11.Response, headers: dict[bytes, bytes]) -> None:
        self.begun, self._status = True, response.status_code
        tokens = {token.strip() for token in headers.get(b"connection", b"").lower().split(b",")}
        self.reusable = b"close" not in tokens and response.http_version >= b"1.1"
        if self._status != 200:
            return
        if b"json" in headers.get(b"content-type", b""):
            raise RequestFailed("shape", "not a stream", f"the answer is {headers[b'content-type'].decode('latin-1')}")
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._chunks = Chunked()


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
