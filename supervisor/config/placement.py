"""The placement of nodes on machines.

A node names its machine by `host`: `localhost`, a name or an address. Names are resolved here and nowhere else, and an
address is this machine's own if a socket can be bound to it.
"""

from __future__ import annotations

import socket

from protocol.errors import StartFailed
from supervisor.config.schema import Cluster
from supervisor.config.sections import LOOPBACK_HOSTS, WILDCARD_HOSTS


def select_nodes(cluster: Cluster, name: str | None) -> tuple[str, ...]:
    """Return the nodes to run: the node `name`, else all nodes on this host.

    The only node of a file runs on any host, and so do its processes. Raises `StartFailed` if there is none to run.
    """
    if name in cluster.processes:
        return cluster.processes[name]
    if name is not None:
        if name not in cluster.node:
            raise StartFailed(f"there is no node {name}; there is {', '.join(cluster.node)}")
        return (name,)
    if len(cluster.node) - sum(len(names) - 1 for names in cluster.processes.values()) == 1:
        return tuple(cluster.node)
    is_local = {host: is_local_host(host) for host in {node.host for node in cluster.node.values()}}
    names = tuple(name for name, node in cluster.node.items() if is_local[node.host])
    if not names:
        places = ", ".join(f"{name} on {node.host}" for name, node in cluster.node.items())
        raise StartFailed(
            f"the file places no node on this host, {socket.gethostname()}: {places}; or name one with --node"
        )
    return names


def is_local_host(host: str) -> bool:
    """Whether a name or an address, such as a loopback one, is this host's."""
    if host in {*LOOPBACK_HOSTS, socket.gethostname()}:
        return True
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(family, address) for family, _, _, _, address in infos)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    """Whether an address is this host's, by binding a socket to it."""
    if address[0] in WILDCARD_HOSTS:
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
