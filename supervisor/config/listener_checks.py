"""Which parts of a cluster would listen where another one does, however their addresses are spelled."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from protocol.strict.mistakes import Mistake
from supervisor.config.schema import LOOPBACK_HOSTS, Cluster

IPV4, IPV6 = "every IPv4 address", "every IPv6 address"
SPELLED = {  # what an address stands for, beside itself
    "localhost": ("127.0.0.1", "::1"),
    "0.0.0.0": (IPV4,),  # noqa: S104  # it is recognised here, not bound
    "::": (IPV4, IPV6),
    "": (IPV4, IPV6),
}

NOT_OF_ONE_HOST = {"127.0.0.1", "::1", IPV4, IPV6}


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
        if self.machine != other.machine:  # every host has its own loopback, but an address one host alone
            return bool(self.addresses & other.addresses - NOT_OF_ONE_HOST)
        return bool(self.addresses & other.addresses) or self._covers(other) or other._covers(self)

    def _covers(self, other: _Listener) -> bool:
        every = {IPV6 if ":" in each else IPV4 for each in other.addresses}
        return bool(self.addresses & every)


def collisions(cluster: Cluster) -> Iterator[Mistake]:
    """Yield each listener that would be where one before it is."""
    before: list[_Listener] = []
    for each in _listeners(cluster):
        if (other := next(filter(each.collides, before), None)) is not None:
            yield Mistake(each.key, f"is where {other.about}")
        before.append(each)


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
            about = f"node {name} tells its numbers"
            yield _listener(f"node.{name}.metrics", about, node.host, node.metrics.host, node.metrics.port)


def _listener(key: str, about: str, machine: str, host: str, port: int) -> _Listener:
    where = "localhost" if machine in LOOPBACK_HOSTS else machine.lower()
    return _Listener(key, about, where, frozenset(SPELLED.get(host.lower(), (host.lower(),))), port)
