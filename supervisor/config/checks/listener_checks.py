"""Collisions of listening addresses: two parts of a cluster on one port of one machine, in any spelling."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import TypeAlias

from attrs import frozen

from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.schema import Cluster
from supervisor.config.sections import machine_of

IPV4, IPV6 = "every IPv4 address", "every IPv6 address"
ALIASES = {  # the addresses behind a host
    "localhost": ("127.0.0.1", "::1"),
    "0.0.0.0": (IPV4,),  # noqa: S104  # it is recognised here, not bound
    "::": (IPV4, IPV6),
    "": (IPV4, IPV6),
}

SHARED_BY_MACHINES = {"127.0.0.1", "::1", IPV4, IPV6}


_Claim: TypeAlias = tuple[str | None, int, str, str]
"""A machine (None for all of them), a port, and an address in use ("at") or a wildcard around it ("in")."""


@frozen
class _Listener:
    key: str
    about: str
    machine: str
    addresses: frozenset[str]
    port: int

    @property
    def wildcards(self) -> frozenset[str]:
        """The wildcards around its addresses."""
        return frozenset(IPV6 if ":" in address else IPV4 for address in self.addresses)

    @property
    def claims(self) -> Iterator[_Claim]:
        """Its own claims: its addresses on its machine and, unless each machine has them, on all."""
        yield from ((self.machine, self.port, "at", address) for address in self.addresses)
        yield from ((self.machine, self.port, "in", wildcard) for wildcard in self.wildcards)
        yield from ((None, self.port, "at", address) for address in self.addresses - SHARED_BY_MACHINES)

    @property
    def obstacles(self) -> Iterator[_Claim]:
        """The colliding claims of others."""
        yield from ((self.machine, self.port, "at", address) for address in self.addresses | self.wildcards)
        yield from ((self.machine, self.port, "in", address) for address in self.addresses)
        yield from ((None, self.port, "at", address) for address in self.addresses - SHARED_BY_MACHINES)


def collisions(cluster: Cluster) -> Iterator[Mistake]:
    """Yield a mistake for each listener at an earlier one's address, once for all its ranks."""
    reported = set[tuple[str, str]]()
    earlier: dict[_Claim, tuple[int, _Listener]] = {}  # the first listener with each claim, and its number
    for number, listener in enumerate(_listeners(cluster)):
        if listener.port == 0:  # the system chooses a free one
            continue
        others = [earlier[claim] for claim in listener.obstacles if claim in earlier]
        if others:
            _, other = min(others, key=itemgetter(0))
            if (listener.key, other.about) not in reported:
                reported.add((listener.key, other.about))
                yield Mistake(listener.key, f"is where {other.about}")
        for claim in listener.claims:
            earlier.setdefault(claim, (number, listener))


def _listeners(cluster: Cluster) -> Iterator[_Listener]:
    keys = {process: name for name, processes in cluster.processes.items() for process in processes}
    for name, node in cluster.node.items():
        if node.listen is not None:
            key = f"node.{keys.get(name, name)}.listen"
            yield _listener(key, f"node {name} listens", node.host, node.listen.host, node.listen.port)
    gateway = cluster.gateway  # gateways of one machine share a listener
    for machine in dict.fromkeys(
        machine_of(cluster.node[name].host) for name in cluster.gateway_nodes if name in cluster.node
    ):
        yield _listener("gateway.port", "the gateway is", machine, gateway.host, gateway.port)
    for name, node in cluster.node.items():
        if node.metrics is not None:
            key, about = f"node.{keys.get(name, name)}.metrics", f"node {name} serves its metrics"
            yield _listener(key, about, node.host, node.metrics.host, node.metrics.port)
    for name, engine in cluster.engine.items():
        if (host := cluster.host_of(engine)) is None:
            continue
        for key, at in engine.events.endpoints.items():
            own = join(join("engine", segment(name)), f"events.{key}")
            for rank in range(engine.data_parallel):
                yield _listener(own, f"engine {name} publishes its events", host, at.host, at.port + rank)


def _listener(key: str, about: str, machine: str, host: str, port: int) -> _Listener:
    return _Listener(key, about, machine_of(machine), frozenset(ALIASES.get(host.lower(), (host.lower(),))), port)
