"""One HTTP request and its answer, as a route sees them: the answer's bytes go through h11 into the client's outbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import h11
import trio
from attrs import define, field

from actors.kit.offload import Offload
from protocol.dialects import http as shapes
from protocol.dialects.request_body import reading_work
from protocol.errors import RequestError, SlowClient, UnsupportedMediaType, UpgradeRequired
from protocol.openapi.document import Operation
from protocol.trace import Trace, child_span, read
from supervisor.gateway.access_log import WHAT_CHARACTERS_MAX
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import Key
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.origins import Header
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import RequestRecord

T = TypeVar("T")

JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")  # what is safe in any log and any shell
QUERY_FIELDS_MAX = 32
UNREAD_PIECES_MAX = 64  # of a body that nobody wants, read to keep its connection: a piece can be a single byte
BODY_BYTES_FREE = 16 * 1024  # of each body, so that small requests are read whatever else is kept


@define(eq=False)
class Exchange:
    """One request, or what came in its place, and the only way to answer it."""

    gateway: Gateway
    outbox: Outbox
    syntax: h11.Connection
    request: h11.Request | None = None  # None: what came could not be read, or nothing came
    operations: tuple[Operation, ...] = ()  # of all routes of this server, for the one that describes them
    key: Key | None = None  # once its caller is known
    allow: bytes = b""  # the methods that its path knows, once that is known
    probe: bool = False  # monitors ask this route every few seconds
    last: bool = False  # nothing that follows on this connection will be answered
    request_id: str = ""
    asked_at: float = 0.0
    caller: Trace | None = None  # where the client says that it stands in a trace
    trace: Trace | None = None
    _begins_at: int = 0  # its place among all that was put into the outbox
    body_held: MemoryReservation = field(init=False)
    answer_held: MemoryReservation = field(init=False)
    _counted: RequestRecord | None = None
    _unfinished: bool = False  # the rest of a body is still to be put

    def __attrs_post_init__(self) -> None:
        self.asked_at = trio.current_time()
        self._begins_at = self.outbox.accepted_bytes
        self.body_held, self.answer_held = (
            self.gateway.bodies.reserve(None, BODY_BYTES_FREE),
            self.gateway.answers.reserve(None),
        )
        self.request_id = self._given_id() or self.gateway.new_id()
        if self.request is not None:
            self.caller = read(self.headers)
            self.trace = child_span(self.caller, self.gateway.new_id())

    def own(self, key: Key) -> None:
        """Note whose request it is; its memory is taken in that name."""
        self.key = key
        self.body_held.owner = self.answer_held.owner = self.gateway.memory_owner(key)

    def release(self) -> None:
        """Give back the memory that the request and its answer have taken."""
        self.body_held.release()
        self.answer_held.release()

    # What was asked ------------------------------------------------------------------------

    @property
    def headers(self) -> list[Header]:
        """The headers of the request, their names in lower case."""
        return [] if self.request is None else list(self.request.headers)

    def header(self, name: bytes) -> bytes:
        """Return the values of a header, joined as HTTP joins them; empty if it is not there."""
        return b", ".join(value for key, value in self.headers if key == name)

    @property
    def method(self) -> str:
        """The method of the request."""
        return "" if self.request is None else self.request.method.decode("latin-1")

    @property
    def path(self) -> str:
        """The path that was asked for, without the query; `*` stands for the server as a whole."""
        target = b"" if self.request is None else self.request.target
        if not target.startswith((b"http://", b"https://")):
            return target.decode("latin-1").partition("?")[0]
        try:  # whoever takes us for a proxy names us in the target
            return urlsplit(target.decode("latin-1")).path or "/"
        except ValueError:
            return ""

    def query(self, name: str) -> str | None:
        """Return the first value of this name in what follows the `?`, None if there is none."""
        target = "" if self.request is None else self.request.target.decode("latin-1")
        try:
            return parse_qs(target.partition("?")[2], max_num_fields=QUERY_FIELDS_MAX).get(name, [None])[0]
        except ValueError:
            return None

    @property
    def what(self) -> str:
        """What a log calls the request; what follows a `?` may be secret, so it is left out."""
        return "connection" if self.request is None else f"{self.method} {self.path}"[:WHAT_CHARACTERS_MAX]

    def counted(self, model: str, api: str) -> RequestRecord:
        """Return the account of the answer that this request asks a model for."""
        key = self.key or self.gateway.keys.anonymous
        self._counted = RequestRecord(
            self.request_id, model, api, self.asked_at, key=key, what=self.what, trace=self.trace, settles=False
        )
        return self._counted

    def settle(self, *, lost: bool = False) -> None:
        """Have the answer counted and logged as what the client gets of it, once the socket has taken it or cannot.

        `lost` says that its end could not be put; the first call counts.
        """
        counted, self._counted = self._counted, None
        if counted is None:
            return
        outbox, gateway = self.outbox, self.gateway
        begins_at, ends_at = self._begins_at, outbox.accepted_bytes
        lost = lost or self._unfinished

        def sent(whole: bool) -> None:
            counted.sent_bytes = max(0, min(outbox.sent_bytes, ends_at) - begins_at)
            gateway.runner.settle(counted, None if whole and not lost else gateway.cut_reason(outbox))

        outbox.on_sent(sent)

    async def read(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Return what a body says, or raise the `RequestError` that lists its mistakes; a long one is read aside."""
        return await self.run_aside(reading_work(body), partial(parse, body))

    async def run_aside(self, size: int, function: Callable[[], T]) -> T:
        """Return what the function returns, run in a thread if it is long, in the turns of this request's key."""
        key = self.key or self.gateway.keys.anonymous
        return await Offload(self.gateway.aside, key.name).run(size, function)

    def check_media(self) -> None:
        """Raise `UnsupportedMediaType` if the headers say that the body is something else than JSON as it is."""
        if (coding := self.header(b"content-encoding").strip().lower()) not in {b"", b"identity"}:
            raise UnsupportedMediaType(f"the body is encoded as {_short(coding)}; send it as it is")
        kind = self._media()
        fine = kind in {b"", b"application/json", b"text/json", b"application/x-www-form-urlencoded"}
        if not fine and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            raise UnsupportedMediaType(f"the body is {_short(kind)}; send application/json")

    def check_form(self, body: bytes) -> None:
        """Raise `UnsupportedMediaType` for a real form: many a client calls JSON one if it is not told otherwise."""
        if self._media() == b"application/x-www-form-urlencoded" and not body.lstrip().startswith(b"{"):
            raise UnsupportedMediaType("the body is a form; send application/json")

    # The answer ------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the client has been sent the beginning of an answer."""
        return self.syntax.our_state not in {h11.IDLE, h11.SEND_RESPONSE}

    def reply(self, status: int, headers: list[Header], body: bytes) -> None:
        """Answer with a whole body; the answer to a HEAD leaves the body away, and a 204 has none."""
        if status != 204:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        head_only = self.method == "HEAD"
        self.outbox.put(self._head(status, headers) + self._data(b"" if head_only else body) + self._end())

    async def reply_in_pieces(self, status: int, headers: list[Header], size: int, pieces: Iterator[bytes]) -> None:
        """Answer with a body that is long, as fast as the client reads: what it has not read yet is in no backlog."""
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
        """Write the next server-sent events of an answer; the first ones take the head along."""
        if self.begun:
            self.outbox.put(self._data(events))
        else:
            self.outbox.put(self._head(200, EVENTS) + self._data(events))

    def finish(self, events: bytes) -> None:
        """Write the last server-sent events of an answer."""
        head = b"" if self.begun else self._head(200, EVENTS)
        self.outbox.put(head + self._data(events) + self._end())

    def abort_stream(self, events: bytes, error: RequestError) -> None:
        """Write why an answer that has begun ends early; without the end of a body, it never looks whole."""
        if not isinstance(error, SlowClient):
            self.outbox.put(self._data(events))
        elif self.outbox.sent_bytes >= self._begins_at:  # else it would stand in the middle of an earlier answer
            self.outbox.put_last(self._data(events))
        self.syntax.send_failed()

    def fail(self, error: RequestError, status: int | None = None) -> None:
        """Answer with an error, unless the answer has begun: then it never ends, which is an error too."""
        status = status or error.http_status
        self.gateway.log_refused(
            error,
            request_id=self.request_id,
            what=self.what,
            key=self.key,
            status=status,
            trace=self.trace,
            probe=self.probe,
        )
        if self.begun:
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
        """Whether the next request can be told from the rest of this one; reads a little of what is there already."""
        try:
            for _ in range(UNREAD_PIECES_MAX):
                if self.syntax.their_state is not h11.SEND_BODY:
                    return self.syntax.their_state is not h11.ERROR
                if not isinstance(self.syntax.next_event(), h11.Data | h11.EndOfMessage):
                    return False
        except h11.RemoteProtocolError:
            pass
        return False

    # --------------------------------------------------------------------------------------------

    def _head(self, status: int, headers: list[Header]) -> bytes:
        self._begins_at = self.outbox.accepted_bytes
        headers = [
            (b"date", _date(int(self.gateway.now()))),
            *headers,
            (b"x-request-id", self.request_id.encode()),
        ]
        headers += [header for header in self.gateway.origins.cors_headers(self.headers) if header not in headers]
        options = [name for name, _ in headers if name == b"upgrade"]  # it counts only if named here (RFC 9110, 7.8)
        if self.last or self.gateway.gate.draining or not self.all_read():
            options.append(b"close")
        if options:
            headers.append((b"connection", b", ".join(options)))
        reason = HTTPStatus(status).phrase.encode()
        return self.syntax.send(h11.Response(status_code=status, headers=headers, reason=reason)) or b""

    def _data(self, data: bytes) -> bytes:
        return self.syntax.send(h11.Data(data=data)) or b""

    def _end(self) -> bytes:
        return self.syntax.send(h11.EndOfMessage()) or b""

    def _given_id(self) -> str | None:
        """Return the client's own id of the request if it gave a decent one."""
        given = self.header(b"x-request-id")
        return given.decode() if REQUEST_ID.fullmatch(given) is not None else None

    def _media(self) -> bytes:
        return self.header(b"content-type").partition(b";")[0].strip().lower()


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def _short(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))
