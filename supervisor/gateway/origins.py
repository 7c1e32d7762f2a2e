"""The host names of this server, and the web pages that may use it: `Host`, `Origin` and CORS.

Any web page can make a browser that can reach this server send requests to it, to localhost too. The browser adds the
origin of the page and the host name of the URL. Both are checked on every request, whether keys are wanted or not: a
foreign host name means that a foreign DNS entry points here (DNS rebinding). Probes are answered whatever the host
name: load balancers and kubelets send the address of the machine, many of them cannot send another, and the answer has
nothing of any client. The headers of CORS allow the browser to show a response to the page. They never allow
credentials: a page sends its key as a header.
"""

from __future__ import annotations

import re

from attrs import frozen

from protocol.errors import Forbidden
from supervisor.config.limits import WILDCARD
from supervisor.gateway.keys.keys import Header, Headers

METHODS = b"GET, HEAD, POST, OPTIONS"
EXPOSED = b"x-request-id, retry-after, x-should-retry"  # headers that a page may read beside those of the CORS standard
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
PREFLIGHT_S = 600  # for which a browser may cache the response to a preflight
AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{0,5}))?")
ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}
PORT_MAX = 65535
CHARACTERS_MAX = 256  # of a client's text that an error quotes


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


@frozen
class Origins:
    """The host names of a server, and the origins of foreign pages that may use it; in both, `*` is any."""

    hosts: frozenset[str]  # without the port
    origins: frozenset[str] = frozenset()

    def check_headers(self, headers: Headers, *, any_host: bool = False) -> None:
        """Raise `Forbidden` for a page of an origin that is not allowed, or, unless `any_host`, for another host."""
        # Each header read here stands at most once: see `http/head_checks.py`.
        given = dict(headers)
        host = given.get(b"host", b"").decode("latin-1")
        target = authority(host)
        if not (any_host or self._answers_to(target)):
            raise Forbidden(_foreign_host(host, target))
        if b"origin" not in given:
            # The GET of an image, for example, has no `Origin`.
            if given.get(b"sec-fetch-site") == b"cross-site":
                raise Forbidden("other sites' pages may not use this server")
            return
        origin = given[b"origin"].decode("latin-1")
        if not (self._allows(origin) or (target is not None and self._is_own(origin, target))):
            raise Forbidden(f"pages of {origin[:CHARACTERS_MAX]!r} may not use this server")

    def cors_headers(self, headers: Headers) -> list[Header]:
        """Return the response headers that let a page of an allowed origin read the answer to this request."""
        if not self.origins:
            return []
        origin = dict(headers).get(b"origin")
        # A cache must not give this answer to a page of another origin.
        vary = (b"vary", b"origin")
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
        # `*` would not cover `authorization`.
        if HEADER_NAMES.fullmatch(requested):
            response.append((b"access-control-allow-headers", requested))
        if given.get(b"access-control-request-private-network") == b"true":
            response.append((b"access-control-allow-private-network", b"true"))
        return response

    def _answers_to(self, target: Authority | None) -> bool:
        return target is not None and (WILDCARD in self.hosts or target.host in self.hosts)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and (WILDCARD in self.origins or origin.lower() in self.origins)

    def _is_own(self, origin: str, host: Authority) -> bool:
        """Whether a page came from the very host and port that it calls now, by a host name of this server."""
        return host.host in self.hosts and same_origin(origin, host)


def _foreign_host(host: str, target: Authority | None) -> str:
    """Return the refusal of a `Host` header, with the configuration that would allow it."""
    refusal = f"this server does not answer to the host {host[:CHARACTERS_MAX]!r}"
    if target is None:
        return f"{refusal}: the header `Host` must be a host name or an address, with or without a port"
    return (
        f"{refusal}; if that is a name of this server, add it to the list of its names in the cluster file:"
        f' [gateway] allowed_hosts = ["{target.host}"]'
    )
