"""Strict checks of a request's head, where h11 or the standard library accepts too much.

If two servers read one request differently, a second request can be smuggled past the first of them. So everything that
a proxy in front of this server may read in another way is refused. Two oddities cannot be refused here, because only
h11 sees them: long chunk extensions, and a bare line feed in the lines between chunks.
"""

from __future__ import annotations

import re

from protocol.errors import BadRequest
from supervisor.gateway.http.plain_head import RequestHead

HEADERS_MAX = 512  # proxies add a few dozen; each costs time here, however short
VERSIONS = frozenset({b"1.0", b"1.1"})
SINGLE = (b"host", b"origin", b"authorization", b"api-key", b"x-api-key")  # of two, a proxy may read the other one
FOLDED = re.compile(rb"\n[ \t]")
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")


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
