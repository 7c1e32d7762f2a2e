"""One GET of one URL over an open connection: its response, read in pieces and within limits.

The other end is chosen by a client. So every byte counts, heads and chunks included; an encoded body is refused, since
it could grow; and many small pieces are read late, a few pieces a turn of the event loop, and refused if they do not
end.
"""

from __future__ import annotations

import h11
import trio
from attrs import frozen

from protocol.errors import BadRequest, TooLarge
from supervisor.media.contents import StoredContent, content_writer
from supervisor.media.urls import WebUrl

READ_BYTES = 64 * 1024
HEAD_BYTES_MAX = 32 * 1024
FRAMING_BYTES_MAX = 64 * 1024  # heads, and the framing of chunks
EVENTS_A_TURN = 16
EVENTS_MAX, EVENT_BYTES_MIN = 1_000, 512  # further events must have so many bytes on average: each takes some 20 us
SMALL_BYTES, PAUSE_S = 4096, 0.002  # a pause after each small read collects a packet a byte into few reads
REDIRECTS = frozenset({301, 302, 303, 307, 308})
OK = 200
ACCEPT = "image/png, image/jpeg, image/webp, image/gif, video/mp4, video/webm, */*;q=0.1"


@frozen
class Redirect:
    """Another URL to ask instead, in the server's own words."""

    location: str


@frozen
class HttpLimits:
    """The limits of one response: the bytes of its body, and the time without a byte."""

    bytes_max: int
    stall_s: float


async def get(stream: trio.abc.Stream, url: WebUrl, agent: str, limits: HttpLimits) -> StoredContent | Redirect:
    """Ask for a URL and return the body, or a redirect; raises `BadRequest`, `TooLarge`, or an error of `stream`."""
    reader = _Reader(stream, limits)
    headers = [
        ("Host", url.authority),
        ("User-Agent", agent),
        ("Accept", ACCEPT),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    request = h11.Request(method="GET", target=url.target, headers=headers)
    sent = reader.connection.send(request)
    end = reader.connection.send(h11.EndOfMessage())
    with trio.fail_after(limits.stall_s):
        await stream.send_all((sent or b"") + (end or b""))
    try:
        response = await reader.response()
        if response.status_code in REDIRECTS:
            return Redirect(_header(response, b"location") or "")
        _check_head(response, limits.bytes_max)
        return await reader.body()
    except h11.RemoteProtocolError as error:
        raise BadRequest("the server of the URL broke the rules of HTTP, or ended its answer too early") from error


class _Reader:
    def __init__(self, stream: trio.abc.Stream, limits: HttpLimits) -> None:
        self.connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._stream, self._limits = stream, limits
        self._received, self._events = 0, 0

    async def response(self) -> h11.Response:
        """Return the head of the response."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise BadRequest("the server of the URL closed the connection without an answer")

    async def body(self) -> StoredContent:
        """Return the body."""
        with content_writer() as writer:
            while not isinstance(event := await self._event(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise BadRequest("the server of the URL closed the connection within its answer")
                writer.write(bytes(event.data))
                if writer.size_bytes > self._limits.bytes_max:
                    raise _too_large(self._limits.bytes_max)
            return writer.finish()

    async def _event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            with trio.fail_after(self._limits.stall_s):
                data = await self._stream.receive_some(READ_BYTES)
            self._received += len(data)
            if self._received > self._limits.bytes_max + FRAMING_BYTES_MAX:
                raise _too_large(self._limits.bytes_max)
            self.connection.receive_data(bytes(data))
            if 0 < len(data) < SMALL_BYTES:
                await trio.sleep(PAUSE_S)
        self._events += 1
        if self._events > EVENTS_MAX + self._received // EVENT_BYTES_MIN:
            raise BadRequest("the server of the URL sends its answer in too small pieces")
        if self._events % EVENTS_A_TURN == 0:
            await trio.lowlevel.checkpoint()
        return event


def _check_head(response: h11.Response, bytes_max: int) -> None:
    if response.status_code != OK:
        raise BadRequest(f"the server of the URL answered with the status {response.status_code}")
    encoding = _header(response, b"content-encoding")
    if encoding is not None and encoding.lower() not in {"", "identity"}:
        raise BadRequest("the server of the URL sent an encoded body, although it was asked not to")
    length = _header(response, b"content-length")  # a number, as h11 has checked
    if length is not None and int(length) > bytes_max:
        raise _too_large(bytes_max)


def _header(response: h11.Response, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in response.headers if key == name), None)


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"a content can have {bytes_max:,} bytes, and the URL leads to more")
