"""The fetch of a content by its URL, from allowed sources only.

A host is checked three times: its name against the list of the operator, its resolved addresses, and both again after
each redirect. The checked address itself is dialed, so a name that later resolves to another address gains nothing. A
fault of a foreign server is an error of the client with its URL. All unreachable hosts get the same error, so that
clients cannot map our network.
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urljoin

import trio
from attrs import frozen

from actors.media.media import Allowance, Source
from protocol.errors import BadRequest, Overloaded
from supervisor.config import media as config
from supervisor.config.media import HostPattern, is_address
from supervisor.media import http, urls
from supervisor.media.addresses import IpAddress, may_be_asked
from supervisor.media.contents import StoredContent, content_writer
from supervisor.media.files import MediaFiles
from supervisor.media.http import HttpLimits, Redirect
from supervisor.media.network import FetchNetwork
from supervisor.media.urls import FileUrl, WebUrl

log = logging.getLogger(__name__)

RESOLVE_S = 5.0
CONNECT_S = 5.0  # one address, TLS included
STALL_S = 5.0  # the time without a byte
TEXT_PIECE = 256 * 1024  # characters of a data URL written in one turn
OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.EADDRNOTAVAIL}


@frozen(kw_only=True)
class FetchRules:
    """The allowed sources, and the limits of a fetch."""

    hosts: Sequence[HostPattern]
    networks: Sequence[config.IpNetwork]
    bytes_max: int
    fetch_s: float
    agent: str
    redirects_max: int = 3


@frozen(eq=False)
class Fetcher:
    """Fetches contents."""

    rules: FetchRules
    network: FetchNetwork
    files: MediaFiles
    tls: ssl.SSLContext
    free: Callable[[int], None]  # closes the descriptor of a content outside the event loop

    def source(self, url: str) -> Source:
        """Return the cost of a URL; raises `BadRequest`, `TooLarge` or `Unsupported` if it may not be opened."""
        if urls.is_data(url):
            urls.check_data(url, self.rules.bytes_max)
            return Source(2 * len(url), is_remote=False)  # the text, and beside it the decoded bytes
        parsed = urls.parse(url)
        if isinstance(parsed, FileUrl):
            self.files.check()
        else:
            urls.check_allowed(parsed, self.rules.hosts)
        return Source(self.rules.bytes_max, is_remote=True)

    async def fetch(self, url: str, allowance: Allowance) -> StoredContent:
        """Return the content of a URL; raises `RequestError`."""
        try:
            content = await self._fetched(url, allowance)
        except trio.TooSlowError as error:
            raise BadRequest(
                f"the URL was not fetched within {self.rules.fetch_s:g} s, or its server paused"
            ) from error
        except OSError as error:
            if error.errno in OURS:
                raise Overloaded("there is no memory or no descriptor left to fetch to") from error
            raise BadRequest("the server of the URL ended the connection") from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BadRequest("the server of the URL ended the connection") from error

        else:
            content.free = self.free
            return content

    async def _fetched(self, url: str, allowance: Allowance) -> StoredContent:
        if urls.is_data(url):
            return await _stored_text(url)
        parsed = urls.parse(url)
        if isinstance(parsed, FileUrl):
            return await self.files.read(parsed, self._bytes_max(allowance), owner=allowance.owner)
        with trio.fail_after(self.rules.fetch_s):
            return await self._follow(url, parsed, allowance)

    async def _follow(self, text: str, url: WebUrl, allowance: Allowance) -> StoredContent:
        """Fetch a URL, by way of redirects."""
        for _ in range(self.rules.redirects_max + 1):
            urls.check_allowed(url, self.rules.hosts)
            answer = await self._get(url, allowance)
            if not isinstance(answer, Redirect):
                return answer
            text, url = _redirected(text, url, answer)
        raise BadRequest(f"the URL leads through more than {self.rules.redirects_max} redirects")

    async def _get(self, url: WebUrl, allowance: Allowance) -> StoredContent | Redirect:
        stream = await self._connected(url, allowance.owner)
        try:
            return await http.get(stream, url, self.rules.agent, HttpLimits(self._bytes_max(allowance), STALL_S))
        finally:
            await trio.aclose_forcefully(stream)  # noqa: ASYNC102  # it does not wait

    def _bytes_max(self, allowance: Allowance) -> int:
        return min(allowance.bytes_max, self.rules.bytes_max)

    async def _connected(self, url: WebUrl, owner: str) -> trio.abc.Stream:
        """Return a connection to the host of a URL, at a checked address."""
        for address in await self._addresses(url, owner):
            try:
                with trio.move_on_after(CONNECT_S):
                    return await self._dial(url, address)
            except (OSError, trio.BrokenResourceError) as error:
                if isinstance(error, OSError) and error.errno in OURS:
                    raise
                if isinstance(error.__cause__, ssl.SSLError):
                    raise BadRequest(f"the TLS certificate of {url.authority} cannot be verified") from error
        raise _unreachable(url)

    async def _addresses(self, url: WebUrl, owner: str) -> list[IpAddress]:
        addresses: Sequence[IpAddress] = ()
        if is_address(url.host):
            addresses = (ip_address(url.host),)
        else:
            # Half of the time of a fetch at most: a wait for a thread must not look like a slow server.
            within_s = min(RESOLVE_S, self.rules.fetch_s / 2)
            try:
                with suppress(trio.TooSlowError):
                    addresses = await self.network.resolve(url.host, url.port, owner=owner, within_s=within_s)
            except (OSError, UnicodeError, ValueError) as error:
                raise _unreachable(url) from error
        allowed = [address for address in addresses if may_be_asked(address, self.rules.networks)]
        if not allowed:
            extra = {"host": url.host, "addresses": [str(address) for address in addresses]}
            log.info("a URL of a client leads to no address that may be asked", extra=extra)
            raise _unreachable(url)
        return allowed

    async def _dial(self, url: WebUrl, address: IpAddress) -> trio.abc.Stream:
        stream = await self.network.connect(address, url.port)
        if url.scheme == "http":
            return stream
        encrypted = trio.SSLStream(stream, self.tls, server_hostname=url.host, https_compatible=True)
        try:
            await encrypted.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)  # noqa: ASYNC102, ASYNC120  # it does not wait
            raise
        return encrypted


def _unreachable(url: WebUrl) -> BadRequest:
    """Return the one error for unknown names, silent hosts and forbidden ones."""
    return BadRequest(f"{url.authority} cannot be reached from this server")


def _redirected(text: str, url: WebUrl, redirect: Redirect) -> tuple[str, WebUrl]:
    if not redirect.location:
        raise BadRequest("the server of the URL redirects to nowhere")
    try:
        following = urljoin(text, redirect.location)
    except ValueError as error:
        raise BadRequest("the server of the URL redirects to what is no URL") from error
    parsed = urls.parse(following)
    if not isinstance(parsed, WebUrl):
        raise BadRequest("the server of the URL redirects to a file")
    if url.scheme == "https" and parsed.scheme != "https":
        raise BadRequest("the server of the URL redirects from https to http")
    return following, parsed


async def _stored_text(url: str) -> StoredContent:
    """Return the text of a data URL as a content, written in several turns if it is long."""
    with content_writer() as writer:
        for begin in range(0, len(url), TEXT_PIECE):
            await trio.lowlevel.checkpoint()
            try:
                writer.write(url[begin : begin + TEXT_PIECE].encode("ascii"))
            except UnicodeEncodeError as error:
                raise BadRequest("a data URL must be ASCII") from error
        return writer.finish(is_data_url=True)
