"""The allowed addresses for fetching media: the public internet, and networks allowed by the operator.

A URL is chosen by a client, and the owner of its domain chooses the address: it may be this machine, a neighbour, or a
cloud's address for credentials. An IPv4 address within an IPv6 address is checked as itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import TypeAlias

from supervisor.config.media import IpNetwork

IpAddress: TypeAlias = IPv4Address | IPv6Address

# Public addresses to `is_global`, in some versions of Python, and forbidden here.
FORBIDDEN = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            "168.63.129.16/32",  # Azure's own services, at a public address
            *("::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16"),
            *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)
_NAT64 = ip_network("64:ff9b::/96")
_UNICAST = (ip_network("2000::/3"), _NAT64)  # the assigned part of IPv6


def may_be_asked(address: IpAddress, allowed: Collection[IpNetwork]) -> bool:
    """Whether media may be fetched from an address; `allowed` are further networks of the operator."""
    if any(_within(address, network) for network in allowed):
        return True
    return all(_is_public(each) for each in (address, *_embedded(address)))


def _is_public(address: IpAddress) -> bool:
    if isinstance(address, IPv4Address):
        candidate = address.is_global and not address.is_multicast
    else:
        candidate = address.ipv4_mapped is not None or any(address in network for network in _UNICAST)
    return candidate and not any(_within(address, network) for network in FORBIDDEN)


def _embedded(address: IpAddress) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that packets to an IPv6 address may end at."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            yield address.ipv4_mapped
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo
        if address in _NAT64:
            yield IPv4Address(int(address) & 0xFFFFFFFF)


def _within(address: IpAddress, network: IpNetwork) -> bool:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None and network.version == 4:
        address = address.ipv4_mapped  # a socket dials this one
    return address.version == network.version and address in network
