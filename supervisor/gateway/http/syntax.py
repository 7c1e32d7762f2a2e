"""The syntax of one HTTP connection: plain requests are read and answered here, all others by h11.

The first received bytes of a request decide for all of it. If they are a plain head (`plain_head`), the request is read
and answered here; otherwise an `h11.Connection` gets all received bytes, and reads and answers until the next request.
Both give the same events, and write the same bytes: a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import h11
from attrs import define, field

from protocol.status_phrases import phrase
from supervisor.gateway.http.plain_head import Header, RequestHead, read_plain_head

Event = RequestHead | h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]

BODILESS = frozenset({204, 304})  # statuses of responses that have no body, and no header for its length


@define
class _PlainRequest:
    """The progress of reading a plain request, and of writing its response."""

    body_bytes: int
    left_bytes: int  # of its body, that have not been read
    read: bool = False
    read_failed: bool = False
    begun: bool = False
    answer_left_bytes: int | None = None  # of the response's body; None: it is written in chunks
    ended: bool = False
    closes: bool = False  # the response has announced the end of the connection
    write_failed: bool = False


@define(eq=False)
class HttpSyntax:
    """The bytes of a connection that have not been read, and the states of its request and response.

    What is no HTTP raises `h11.RemoteProtocolError`, and a response out of order `h11.LocalProtocolError`.
    """

    head_bytes_max: int
    _received: bytearray = field(factory=bytearray)  # and not read, as long as h11 has no request
    _closed: bool = False  # by the client
    _plain: _PlainRequest | None = None
    _h11: h11.Connection | None = None

    # The request ---------------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Whether the request that was read last is plain."""
        return self._plain is not None

    @property
    def body_unread(self) -> bool:
        """Whether a part of the body has not been read."""
        if self._plain is not None:
            return not (self._plain.read or self._plain.read_failed)
        return self._h11 is not None and self._h11.their_state is h11.SEND_BODY

    @property
    def read_failed(self) -> bool:
        """Whether what came is no HTTP."""
        if self._plain is not None:
            return self._plain.read_failed
        return self._h11 is not None and self._h11.their_state is h11.ERROR

    @property
    def awaits_continue(self) -> bool:
        """Whether the client sends the body once it has got status 100."""
        return self._h11 is not None and self._h11.they_are_waiting_for_100_continue

    @property
    def trailing_bytes(self) -> bytes:
        """The received bytes behind the part that has been read."""
        return bytes(self._received) if self._h11 is None else bytes(self._h11.trailing_data[0])

    def receive_data(self, data: bytes) -> None:
        """Store received bytes; no bytes mean that the client has closed its side."""
        if self._h11 is not None:
            self._h11.receive_data(data)
        elif data:
            self._received += data
        else:
            self._closed = True

    def next_event(self) -> Event:
        """Return the next part of a request, or a constant of h11 if there is none."""
        if self._plain is not None:
            return self._next_of_plain(self._plain)
        if self._h11 is None:
            if not (self._received or self._closed):
                return h11.NEED_DATA
            if (head := read_plain_head(self._received, self.head_bytes_max)) is not None:
                del self._received[: head.size_bytes]
                self._plain = _PlainRequest(head.body_bytes, head.body_bytes)
                return head.request
        event = self._through_h11().next_event()
        if isinstance(event, h11.Request):
            return RequestHead(event.method, event.target, event.http_version, tuple(event.headers))
        return event

    def take_body(self) -> bytes | None:
        """Return the whole body of a plain request if it has been received, None if it must be read by events."""
        plain = self._plain
        if plain is None or plain.read or len(self._received) < plain.left_bytes:
            return None
        body = bytes(self._received[: plain.left_bytes])
        del self._received[: plain.left_bytes]
        plain.left_bytes, plain.read = 0, True
        return body

    def _next_of_plain(self, plain: _PlainRequest) -> Event:
        if plain.left_bytes and (data := bytes(self._received[: plain.left_bytes])):
            del self._received[: len(data)]
            plain.left_bytes -= len(data)
            return h11.Data(data=data)
        if plain.left_bytes and self._closed:
            plain.read_failed = True
            raise h11.RemoteProtocolError(
                "peer closed connection without sending complete message body"
                f" (received {plain.body_bytes - plain.left_bytes} bytes, expected {plain.body_bytes})"
            )
        if plain.left_bytes:
            return h11.NEED_DATA
        if not plain.read:
            plain.read = True
            return h11.EndOfMessage()
        return h11.PAUSED if self._received else h11.NEED_DATA

    def _through_h11(self) -> h11.Connection:
        """Return the `h11.Connection` of this request, with everything that has been received."""
        if self._h11 is None:
            self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=self.head_bytes_max)
            if self._received:
                self._h11.receive_data(bytes(self._received))
                self._received.clear()
            if self._closed:
                self._h11.receive_data(b"")
        return self._h11

    # The response --------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the head of the response has been written, or never can be."""
        if self._plain is not None:
            return self._plain.begun or self._plain.write_failed
        return self._h11 is not None and self._h11.our_state not in {h11.IDLE, h11.SEND_RESPONSE}

    @property
    def done(self) -> bool:
        """Whether the request has been read and answered, and another may follow it."""
        if (plain := self._plain) is not None:
            return plain.read and plain.ended and not (plain.closes or plain.read_failed or plain.write_failed)
        return self._h11 is not None and self._h11.our_state is self._h11.their_state is h11.DONE

    def start_next_cycle(self) -> None:
        """Prepare for the next request; only once this one is `done`."""
        if self._h11 is not None:
            self._h11.start_next_cycle()
            data, self._closed = self._h11.trailing_data
            self._received += data
        self._plain = self._h11 = None

    def send_continue(self) -> bytes:
        """Return the bytes of status 100."""
        return self._through_h11().send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def send_head(self, status: int, headers: Sequence[Header]) -> bytes:
        """Return the bytes of a head; without `content-length` the body comes in chunks, or raw for HTTP/1.0."""
        if self._plain is not None:
            return self._plain_head(self._plain, status, headers)
        response = h11.Response(status_code=status, headers=list(headers), reason=_reason(status))
        return self._through_h11().send(response)

    def send_data(self, data: bytes) -> bytes:
        """Return the bytes of a part of the response's body."""
        if (plain := self._plain) is None:
            return self._through_h11().send(h11.Data(data=data))
        self._check_begun(plain)
        if plain.answer_left_bytes is None:
            # An empty chunk would end the body.
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        plain.answer_left_bytes -= len(data)
        if plain.answer_left_bytes < 0:
            raise self._out_of_order(plain, "the body is longer than its content-length")
        return data

    def send_end(self) -> bytes:
        """Return the bytes that end a response."""
        if (plain := self._plain) is None:
            return self._through_h11().send(h11.EndOfMessage())
        self._check_begun(plain)
        if plain.answer_left_bytes:
            raise self._out_of_order(plain, "the body is shorter than its content-length")
        plain.ended = True
        return b"0\r\n\r\n" if plain.answer_left_bytes is None else b""

    def send_failed(self) -> None:
        """Note that the rest of the response will not be written."""
        if self._plain is not None:
            self._plain.write_failed = True
        else:
            self._through_h11().send_failed()

    def _plain_head(self, plain: _PlainRequest, status: int, headers: Sequence[Header]) -> bytes:
        if self.begun:
            raise self._out_of_order(plain, "the response has begun")
        left_bytes, closes = 0 if status in BODILESS else None, False
        lines = [b"HTTP/1.1 %d %b" % (status, _reason(status))]
        for name, value in headers:
            lines.append(b"%b: %b" % (name, value))
            if name == b"content-length" and status not in BODILESS:
                left_bytes = int(value)
            elif name == b"connection":
                closes = b"close" in (option.strip() for option in value.lower().split(b","))
        if left_bytes is None:
            lines.append(b"Transfer-Encoding: chunked")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise h11.LocalProtocolError("a header has a line end in it")
        plain.begun, plain.answer_left_bytes, plain.closes = True, left_bytes, closes
        return head + b"\r\n\r\n"

    def _check_begun(self, plain: _PlainRequest) -> None:
        if plain.write_failed or plain.ended or not plain.begun:
            raise self._out_of_order(plain, "no response has begun, or it has ended")

    def _out_of_order(self, plain: _PlainRequest, why: str) -> h11.LocalProtocolError:
        """Return the error of a response that cannot be written as it is wanted; nothing more is written."""
        plain.write_failed = True
        return h11.LocalProtocolError(why)


@lru_cache(maxsize=64)
def _reason(status: int) -> bytes:
    return phrase(status).encode()
