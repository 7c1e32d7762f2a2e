"""The clients' URLs of media, read strictly: the checked URL is the dialed one, byte by byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address
from pathlib import PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

from attrs import frozen

from protocol.dialects.media_urls import PICKLES, URL_CHARACTERS_MAX, mistake_in_data
from protocol.errors import BadRequest, TooLarge, Unsupported
from supervisor.config.media import DEFAULT_PORTS, HostPattern

DATA = "data:"
_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # ASCII without blanks and without the backslash
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252})")


@frozen
class WebUrl:
    """An `http` or `https` URL; `host` is in lower case and without brackets."""

    scheme: str
    host: str
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """The host in the form of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@frozen
class FileUrl:
    """A `file:` URL; `path` is absolute."""

    path: str


def is_data(url: str) -> bool:
    """Whether a URL holds its content itself."""
    return url[: len(DATA)].lower() == DATA


def check_data(url: str, bytes_max: int) -> None:
    """Raise `BadRequest` for a data URL not in base64, `TooLarge` for more characters than `bytes_max` need."""
    if (mistake := mistake_in_data(url)) is not None:
        raise BadRequest(f"the URL {mistake}")
    if len(url) > 3 * bytes_max + URL_CHARACTERS_MAX:  # 4/3 of the bytes, and more with percent-encoded signs
        raise TooLarge(f"a content can have {bytes_max:,} bytes, and this data URL has {len(url):,} characters")


def parse(url: str) -> WebUrl | FileUrl:
    """Return the parts of a URL other than a data URL; raises `BadRequest` or `Unsupported`."""
    if len(url) > URL_CHARACTERS_MAX:
        raise BadRequest(f"the URL has {len(url):,} characters; the limit is {URL_CHARACTERS_MAX:,}")
    if not _PRINTABLE.fullmatch(url):
        raise BadRequest("the URL must be printable ASCII; percent-encode other characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"this is no valid URL: {error}") from error
    if PurePosixPath(unquote(parts.path)).suffix.lower() in PICKLES:
        raise Unsupported("a pickle can run code: send embeddings as a safetensors file, and images and videos as such")
    if parts.scheme == "file":
        return _file(parts)
    if parts.scheme not in DEFAULT_PORTS:
        raise Unsupported("the URL must begin with data:, https:, http: or file:")
    if "@" in parts.netloc:
        raise BadRequest("a URL must not hold a user name or a password")
    host = _host(parts)
    return WebUrl(
        parts.scheme,
        host,
        DEFAULT_PORTS[parts.scheme] if port is None else port,
        f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}",
    )


def check_allowed(url: WebUrl, allowed: Sequence[HostPattern]) -> None:
    """Raise `BadRequest` unless the operator allows the host of a URL."""
    if not any(pattern.matches(url.scheme, url.host, url.port) for pattern in allowed):
        hint = "" if allowed else "; it fetches from none: send the content as a data URL"
        raise BadRequest(f"this server does not fetch from {url.authority}{hint}")


def _host(parts: SplitResult) -> str:
    host = (parts.hostname or "").rstrip(".")
    if parts.netloc.startswith("["):
        try:
            address = IPv6Address(host)
        except ValueError as error:
            raise BadRequest("the host of the URL is no valid IPv6 address") from error
        if address.scope_id is not None:
            raise BadRequest("the host of the URL must be an IPv6 address without a zone")
        return str(address)
    if not _HOST.fullmatch(host) or parts.port == 0:
        raise BadRequest("the host of the URL is not valid")
    return host


def _file(parts: SplitResult) -> FileUrl:
    if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment:
        raise BadRequest("a file URL is like file:///folder/name: without a host, a query and a fragment")
    path = unquote(parts.path, errors="surrogateescape")
    if not path.startswith("/") or "\0" in path:
        raise BadRequest("a file URL needs an absolute path")
    return FileUrl(path)
