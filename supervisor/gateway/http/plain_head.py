"""A strict reader for the heads of requests as stock clients send them; every other head is left to h11.

Clients of models nearly always send the same shape: a POST or GET of HTTP/1.1 with unique headers of printable ASCII,
and a body of a stated length or none. One expression describes that shape and nothing else. Every other head (with a
body in chunks, an upgrade, a repeated or folded header, a stray space or control character) is not plain, and is read
as if this file did not exist. So this file refuses nothing, and h11 would read every plain head in the same way.
"""

from __future__ import annotations

import re

from attrs import field, frozen

Header = tuple[bytes, bytes]

TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]++"
VALUE = rb"[!-~]++(?: [!-~]++)*+"  # one space between words, none around them
HEAD = re.compile(rb"(POST|GET) (/[!-~]*+) HTTP/1\.1\r\n((?:%b: %b\r\n)++)\r\n" % (TOKEN, VALUE))
LENGTH = re.compile(rb"[0-9]{1,15}")
NOT_PLAIN = frozenset({b"transfer-encoding", b"upgrade", b"expect"})


@frozen(eq=False)
class RequestHead:
    """The head of one request; the names of its headers are in lower case."""

    method: bytes
    target: bytes
    http_version: bytes
    headers: tuple[Header, ...]
    values: dict[bytes, bytes] = field()  # of each header; those of equal names joined as HTTP joins them

    @values.default
    def _joined_values(self) -> dict[bytes, bytes]:
        values: dict[bytes, list[bytes]] = {}
        # Thousands of headers may have one name, and they have not been counted yet.
        for name, value in self.headers:
            values.setdefault(name, []).append(value)
        return {name: b", ".join(joined) for name, joined in values.items()}


@frozen(eq=False)
class PlainHead:
    """A plain head, its own length, and that of the body behind it."""

    request: RequestHead
    size_bytes: int
    body_bytes: int


def read_plain_head(received: bytes | bytearray, size_max: int) -> PlainHead | None:
    """Return the head at the start of the received bytes, None if that is not whole, too long or not plain."""
    match = HEAD.match(received)
    if match is None or match.end() > size_max:
        return None
    lines = match[3].split(b"\r\n")
    lines.pop()  # behind the last line end
    headers = []
    for line in lines:
        name, _, value = line.partition(b": ")
        headers.append((name.lower(), value))
    values = dict(headers)
    if len(values) != len(headers) or not NOT_PLAIN.isdisjoint(values) or b"host" not in values:
        return None
    if values.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    length = values.get(b"content-length", b"0")
    if LENGTH.fullmatch(length) is None:
        return None
    return PlainHead(RequestHead(match[1], match[2], b"1.1", tuple(headers), values), match.end(), int(length))
