"""`[gateway.media]`: the limits of images and videos, and their allowed sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from attrs import frozen

from actors.kit.shares import owner_part
from actors.media.content_memory import CONTENT_BYTES_MIN
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake, describe
from supervisor.config.limits import WILDCARD, Bytes, Count, Seconds

MIB = 1024 * 1024
DEFAULT_PORTS = {"http": 80, "https": 443}
IpNetwork: TypeAlias = IPv4Network | IPv6Network

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]{0,252})")
_PORT = re.compile(r":([0-9]{1,5})$")


@frozen(kw_only=True)
class MediaSection:
    """`[gateway.media]`: the limits of images and videos; only the sources allowed here are fetched."""

    # hosts in URLs: `HOST`, `*.DOMAIN` or `*`, with `:PORT` if it is not the scheme's; by default none
    allowed_hosts: tuple[str, ...] = ()
    # private networks in which such hosts may be, such as `10.0.0.0/8`; by default none
    allowed_networks: tuple[str, ...] = ()
    tls_authority: str | None = None  # file with authorities to trust besides those of the system
    file_root: str | None = None  # folder below which `file:` URLs may lead; without it no file is read
    items_max: Count = 16  # images and videos of one request; more are refused
    tokens_max: Count = 65_536  # prompt tokens of all images and videos of one request; more are refused
    bytes_max: Bytes = 16 * MIB  # size of one image or video as it is sent or fetched; larger ones are refused
    pixels_max: Count = 50_000_000  # height times width of an image, or of a frame of a video; larger ones are refused
    seconds_max: Seconds = 600.0  # duration of a video; longer ones are refused
    fetch_s: Seconds = 15.0  # longest time to fetch one of them, redirects included
    prepare_s: Seconds = 60.0  # longest time to fetch and decode all of a request, waits included
    # decoder processes at a time; beside them one for small images of another key
    decoders: Annotated[int, Within(at_least=1, at_most=1024)] = 2
    # filter of system calls around each decoder: without one on this host `required` refuses to start, and `preferred`
    # goes on with a warning, so that a decoder that a content has taken over may read what the node may
    sandbox: Literal["required", "preferred"] = "required"
    # memory for contents of all requests that are not decoded yet, each counted as 1 MiB at least; further ones wait
    fetched_bytes_max: Bytes = 256 * MIB
    # memory for decoded images and videos of all requests, until they are no longer needed; further ones wait
    prepared_bytes_max: Bytes = 1024 * MIB
    # memory for embeddings of all requests, until the answers computed with them are whole; further ones wait
    embedded_bytes_max: Bytes = 1024 * MIB


@frozen
class HostPattern:
    """Allowed hosts: one name, all names below a domain, or any; at one port, or the schemes' own."""

    name: str  # `*.` before a domain; `*` alone is any
    port: int | None = None

    def matches(self, scheme: str, host: str, port: int) -> bool:
        """Whether a host, in lower case, may be asked at a port."""
        if port != (DEFAULT_PORTS[scheme] if self.port is None else self.port):
            return False
        if self.name.startswith("*."):
            return host.endswith(self.name[1:]) and len(host) > len(self.name) - 1
        return self.name in {WILDCARD, host}


def parse_host(text: str) -> HostPattern | None:
    """Return the pattern of a text, None for an invalid one."""
    name, port = text.lower(), None
    if (match := _PORT.search(name)) is not None:
        name, port = name[: match.start()], int(match[1])
        if not 0 < port < 65536:
            return None
    if name.startswith("[") and name.endswith("]"):
        try:
            return HostPattern(str(IPv6Address(name[1:-1])), port)
        except ValueError:
            return None
    if name != WILDCARD and not _NAME.fullmatch(name):
        return None
    return HostPattern(name.rstrip("."), port)


def parse_network(text: str) -> IpNetwork | None:
    """Return the network of a text, None for an invalid one."""
    try:
        return ip_network(text)
    except ValueError:
        return None


def mistakes(section: MediaSection, folder: Path) -> Iterator[Mistake]:
    """Yield the mistakes between the keys of the section; relative paths begin at `folder`."""
    key = "gateway.media"
    for index, text in enumerate(section.allowed_hosts):
        if parse_host(text) is None:
            rule = 'must be a host, "*.domain" or "*", with :PORT behind it or without, and no scheme'
            yield Mistake(f"{key}.allowed_hosts[{index}]", f"{rule}; got {describe(text)}")
    for index, text in enumerate(section.allowed_networks):
        if parse_network(text) is None:
            yield Mistake(f"{key}.allowed_networks[{index}]", f"must be like 10.0.0.0/8, got {describe(text)}")
    if section.file_root is not None and not _is_folder(folder / section.file_root):
        yield Mistake(f"{key}.file_root", f"there is no folder {folder / section.file_root}")
    if section.tls_authority is not None and not (folder / section.tls_authority).is_file():
        yield Mistake(f"{key}.tls_authority", f"there is no file {folder / section.tls_authority}")
    fetched_max = owner_part(section.fetched_bytes_max)
    part = f"one key's part of fetched_bytes_max ({section.fetched_bytes_max}) is {fetched_max}"
    if section.bytes_max > fetched_max:
        yield Mistake(f"{key}.bytes_max", f"is too much: {part}")
    if section.items_max * CONTENT_BYTES_MIN > fetched_max:
        least = f"{section.items_max} contents count {section.items_max * CONTENT_BYTES_MIN} bytes at least"
        yield Mistake(f"{key}.items_max", f"{least}, and {part}")
    if section.prepare_s < section.fetch_s:
        yield Mistake(f"{key}.prepare_s", f"is less than fetch_s ({section.fetch_s:g})")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def is_address(host: str) -> bool:
    """Whether the host of a URL, without brackets, is an address and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
