"""Strict checks of a request's head, where h11 or the standard library accepts too much.

If two servers read one request differently, a second request can be smuggled past the first of them. So whatever a
proxy in front of this server may read in another way is refused. Two oddities cannot be refused here, because only h11
sees them: long chunk extensions, and a bare line feed in the lines between chunks.
"""

from __future__ import annotations

import re

from attrs import frozen

from protocol.errors import BadRequest
from supervisor.gateway.heads.plain_head import RequestHead

HEADERS_MAX = 512  # proxies add a few dozen; each costs time here, however short
VERSIONS = frozenset({b"1.0", b"1.1"})
SINGLE = (b"host", b"origin", b"authorization", b"api-key", b"x-api-key")  # of two, a proxy may read the other one
FOLDED = re.compile(rb"\n[ \t]")
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{0,5}))?")
ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}
PORT_MAX = 65535


@frozen
class Authority:
    """A host, in lower case and without the brackets of an IPv6 address, and a port if one is named."""

    host: str
    port: int | None = None


def authority(text: str) -> Authority | None:
    """Return the host and port of a `Host` header, None if it is neither a host nor a host with a port."""
    match = AUTHORITY.fullmatch(text)
    if match is None:
        return None
    host, port = match[1].strip("[]").lower(), match[2]
    if port and int(port) > PORT_MAX:
        return None
    return Authority(host, int(port) if port else None)


def same_origin(origin: str, host: Authority) -> bool:
    """Whether a page of this origin came from the very host and port that it calls now."""
    match = ORIGIN.fullmatch(origin)
    if match is None or (page := authority(match[2])) is None:
        return False
    default = DEFAULT_PORTS[match[1].lower()]
    return page.host == host.host and (page.port or default) == (host.port or default)


def check_head(raw: bytes, request: RequestHead) -> None:
    """Raise `BadRequest` for a head that a proxy may read otherwise; `raw` holds its bytes as they were received."""
    if request.http_version not in VERSIONS:
        raise BadRequest("this server speaks HTTP/1.1 and HTTP/1.0")
    if BARE_LINE_FEED.search(raw) is not None:
        raise BadRequest("a line of the head ends in a line feed without a carriage return")
    if FOLDED.search(raw) is not None:
        raise BadRequest("a header goes on in a second line; write it in one")
    names = [name for name, _ in request.headers]
    for name in SINGLE:
        if names.count(name) > 1:
            raise BadRequest(f"the header {name.decode()} stands twice")
    if request.http_version == b"1.0" and b"transfer-encoding" in names:
        raise BadRequest("HTTP/1.0 has no transfer-encoding")
