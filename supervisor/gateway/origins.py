"""Which hosts this server answers to, and which web pages may use it: `Host`, `Origin` and CORS.

Any web page can make the browser of somebody near this server send it requests, to localhost too. A browser tells of
which page a request is and by which name it found the server, and both are checked on every request, whether keys are
wanted or not: a name that is not ours may have been made to lead here by somebody else's DNS (rebinding). What a page
may read of an answer is told by the headers of CORS. They never allow credentials: a page sends a key as a header.
"""

from __future__ import annotations

import re

from attrs import frozen

from protocol.errors import Forbidden
from supervisor.config.limits import WILDCARD
from supervisor.gateway.http.head_checks import Authority, authority, same_origin
from supervisor.gateway.keys import Headers

Header = tuple[bytes, bytes]

METHODS = b"GET, HEAD, POST, OPTIONS"
EXPOSED = b"x-request-id, retry-after, x-should-retry"  # what a page may read beside the few headers that it always may
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
PREFLIGHT_S = 600  # for which a browser may keep the answer to a preflight
CHARACTERS_MAX = 256  # of a client's own in an error


@frozen
class Origins:
    """The names of a server, and the origins of foreign pages that may use it; `*` is any, in both."""

    hosts: frozenset[str]  # without the port
    origins: frozenset[str] = frozenset()

    def check(self, headers: Headers) -> None:
        """Raise `Forbidden` for a request to another host, or by a page of an origin that is not allowed."""
        given = dict(headers)  # of what must not stand twice nothing does
        host = given.get(b"host", b"").decode("latin-1")
        named = authority(host)
        if named is None or not (WILDCARD in self.hosts or named.host in self.hosts):
            raise Forbidden(f"this server does not answer to the host {host[:CHARACTERS_MAX]!r}")
        if b"origin" not in given:
            if given.get(b"sec-fetch-site") == b"cross-site":  # an image, say, comes without an `Origin`
                raise Forbidden("other sites' pages may not use this server")
            return
        origin = given[b"origin"].decode("latin-1")
        if not (self._is_own(origin, named) or self._allows(origin)):
            raise Forbidden(f"pages of {origin[:CHARACTERS_MAX]!r} may not use this server")

    def cors_headers(self, headers: Headers) -> list[Header]:
        """Return the response headers that let a page of an allowed origin read the answer to this request."""
        if not self.origins:
            return []
        origin = dict(headers).get(b"origin")
        vary = (b"vary", b"origin")  # a cache must not give this answer to a page of another origin
        if origin is None or not self._allows(origin.decode("latin-1")):
            return [vary]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), vary]

    def preflight_headers(self, headers: Headers) -> list[Header] | None:
        """Return the CORS preflight response headers, or None if this is no preflight or its origin is not allowed."""
        given = dict(headers)
        origin = given.get(b"origin", b"").decode("latin-1")
        if b"access-control-request-method" not in given or not self._allows(origin):
            return None
        response = [
            *self.cors_headers(headers),
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_S),
        ]
        requested = given.get(b"access-control-request-headers", b"")
        if HEADER_NAMES.fullmatch(requested):  # `*` would not cover `authorization`
            response.append((b"access-control-allow-headers", requested))
        if given.get(b"access-control-request-private-network") == b"true":
            response.append((b"access-control-allow-private-network", b"true"))
        return response

    def _allows(self, origin: str) -> bool:
        return bool(origin) and (WILDCARD in self.origins or origin.lower() in self.origins)

    def _is_own(self, origin: str, host: Authority) -> bool:
        """Whether a page came from the very host and port that it asks now, by a name that is really ours."""
        return host.host in self.hosts and same_origin(origin, host)
