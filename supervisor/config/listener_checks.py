"""Collisions of listening addresses: two parts of a cluster on one port of one machine, however that is spelled."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from protocol.strict.mistakes import Mistake
from supervisor.config.schema import LOOPBACK_HOSTS, Cluster

IPV4, IPV6 = "every IPv4 address", "every IPv6 address"
ALIASES = {  # the addresses for which a host stands
    "localhost": ("127.0.0.1", "::1"),
    "0.0.0.0": (IPV4,),  # noqa: S104  # it is recognised here, not bound
    "::": (IPV4, IPV6),
    "": (IPV4, IPV6),
}

SHARED_BY_MACHINES = {"127.0.0.1", "::1", IPV4, IPV6}


@frozen
class _Listener:
    key: str
    about: str
    machine: str
    addresses: frozenset[str]
    port: int

    def collides(self, other: _Listener) -> bool:
        if self.port != other.port or self.port == 0:
            return False
        if self.machine != other.machine:  # loopback is another on each machine; any other address is one machine's
            return bool(self.addresses & other.addresses - SHARED_BY_MACHINES)
        return bool(self.addresses & other.addresses) or self._covers(other) or other._covers(self)

    def _covers(self, other: _Listener) -> bool:
        wildcards = {IPV6 if ":" in address else IPV4 for address in other.addresses}
        return bool(self.addresses & wildcards)


def collisions(cluster: Cluster) -> Iterator[Mistake]:
    """Yield a mistake for each listener whose address is taken by one before it."""
    earlier: list[_Listener] = []
    for listener in _listeners(cluster):
        if (other := next(filter(listener.collides, earlier), None)) is not None:
            yield Mistake(listener.key, f"is where {other.about}")
        earlier.append(listener)


def _listeners(cluster: Cluster) -> Iterator[_Listener]:
    for name, node in cluster.node.items():
        if node.listen is not None:
            yield _listener(
                f"node.{name}.listen", f"node {name} listens", node.host, node.listen.host, node.listen.port
            )
    gateway = cluster.gateway
    if gateway.node in cluster.node:
        machine = cluster.node[gateway.node].host
        yield _listener("gateway.port", "the gateway is", machine, gateway.host, gateway.port)
    for name, node in cluster.node.items():
        if node.metrics is not None:
            about = f"node {name} serves its metrics"
            yield _listener(f"node.{name}.metrics", about, node.host, node.metrics.host, node.metrics.port)


def _listener(key: str, about: str, machine: str, host: str, port: int) -> _Listener:
    machine = "localhost" if machine in LOOPBACK_HOSTS else machine.lower()
    return _Listener(key, about, machine, frozenset(ALIASES.get(host.lower(), (host.lower(),))), port)
