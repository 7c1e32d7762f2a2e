"""One HTTP request up to its body: the head, the id and the caller."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import trio
from attrs import define, field

from protocol.errors import RequestError
from protocol.trace import Trace, from_headers
from supervisor.gateway.access_log import REQUEST_LINE_CHARACTERS_MAX
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.plain_head import Header, RequestHead
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")  # safe in any log and any shell
QUERY_FIELDS_MAX = 32
BODY_BYTES_FREE = 16 * 1024  # of each body, so that small requests are read when the budget is used up


class ClientLeft(Exception):
    """The client has closed its sending side, which is taken for leaving."""


class Unreadable(Exception):
    """The received bytes are no request that this server accepts; `error` is the response to them."""

    def __init__(self, error: RequestError, status: int | None = None, head: RequestHead | None = None) -> None:
        super().__init__(error.detail)
        self.error, self.status, self.head = error, status, head


@define(eq=False)
class HttpRequest:
    """One request of a client, before its body is read."""

    gateway: Gateway
    head: RequestHead | None  # None: it could not be parsed, or did not come
    id: str = field(init=False)
    received_at: float = field(init=False)
    method: str = field(init=False)
    path: str = field(init=False)  # without the query; `*` is the server as a whole
    has_two_lengths: bool = False  # a proxy in front may read the body by another length than this server
    key: ClientKey = field(init=False)  # the anonymous one until the caller is authorized
    caller: Trace | None = None  # the span of the client, from its headers
    trace: Trace | None = None
    allow: bytes = b""  # the methods of its path, once that is found
    probe: bool = False  # its route is called by monitors every few seconds
    memory: MemoryReservation = field(init=False)  # for the body

    def __attrs_post_init__(self) -> None:
        self.received_at = trio.current_time()
        self.id = self._client_request_id() or self.gateway.runtime.new_id()
        self.key = self.gateway.keys.anonymous
        self.memory = self.gateway.memory.bodies.reserve(None, BODY_BYTES_FREE)
        self.method = self.path = ""
        if self.head is not None:
            self.method, self.path = self.head.method.decode("latin-1"), _path(self.head.target)
            values = self.head.values
            self.has_two_lengths = bool(values.get(b"transfer-encoding") and values.get(b"content-length"))
            self.caller = from_headers(self.head.headers)
            self.trace = self.gateway.runtime.next_span(self.caller)

    @property
    def headers(self) -> tuple[Header, ...]:
        """The headers of the request, their names in lower case."""
        return () if self.head is None else self.head.headers

    def header(self, name: bytes) -> bytes:
        """Return the values of a header, joined as HTTP joins them; empty if it is not there."""
        return b"" if self.head is None else self.head.values.get(name, b"")

    def query(self, name: str) -> str | None:
        """Return the first value of a query parameter, None if there is none."""
        target = "" if self.head is None else self.head.target.decode("latin-1")
        try:
            return parse_qs(target.partition("?")[2], max_num_fields=QUERY_FIELDS_MAX).get(name, [None])[0]
        except ValueError:
            return None

    @property
    def query_names(self) -> frozenset[str]:
        """The names of the query parameters, those without a value among them; none if there are too many."""
        target = "" if self.head is None else self.head.target.decode("latin-1")
        try:
            query = parse_qs(target.partition("?")[2], keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
        except ValueError:
            return frozenset()
        return frozenset(query)

    @property
    def line(self) -> str:
        """The method and the path, for logs; the query is left out, since it may be secret."""
        return "connection" if self.head is None else f"{self.method} {self.path}"[:REQUEST_LINE_CHARACTERS_MAX]

    @property
    def media_type(self) -> bytes:
        """The media type of the body, without parameters and in lower case; empty if none is named."""
        return self.header(b"content-type").partition(b";")[0].strip().lower()

    def _client_request_id(self) -> str | None:
        """Return the client's own request id, None without one that is safe in a log."""
        request_id = self.header(b"x-request-id")
        return request_id.decode() if REQUEST_ID.fullmatch(request_id) is not None else None


def _path(target: bytes) -> str:
    if not target.startswith((b"http://", b"https://")):
        return target.decode("latin-1").partition("?")[0]
    # A client that uses this server as a proxy sends a whole URL.
    try:
        return urlsplit(target.decode("latin-1")).path or "/"
    except ValueError:
        return ""
