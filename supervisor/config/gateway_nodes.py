"""The nodes with a gateway, and their division into several processes.

`processes = 4` turns node `front` into the nodes `front-0` to `front-3` of the same machine. All other code handles
nodes alone: only this file, and commands with the name `front`, depend on the division.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import evolve

from protocol.strict.mistakes import Mistake
from supervisor.config.schema import Cluster
from supervisor.config.sections import NodeSection, machine_of
from supervisor.links.endpoint import Endpoint

NAME_LENGTH_MAX = 32
PORT_MAX = 65535


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the mistakes in `gateway.node`, `nodes` and `processes`."""
    gateway = cluster.gateway
    if gateway.node is not None and gateway.nodes:
        yield Mistake("gateway.nodes", "stands beside gateway.node: keep the one that names all gateways")
    named = set[str]()
    for index, name in enumerate(cluster.gateway_nodes):
        key = f"gateway.nodes[{index}]" if gateway.nodes else "gateway.node"
        if name in named:
            yield Mistake(key, f"names node {name} again")
        elif name not in cluster.node and not cluster.cluster.join:
            yield Mistake(key, f"there is no node {name}; there is {', '.join(cluster.node)}")
        elif name in cluster.node and gateway.processes > 1:
            yield from _process_mistakes(cluster, name)
        named.add(name)
    machines = Counter(machine_of(cluster.node[name].host) for name in named & cluster.node.keys())
    if gateway.port == 0 and any(number * gateway.processes > 1 for number in machines.values()):
        yield Mistake("gateway.port", "is 0, a free port for each process, but several share it: name one")


def _process_mistakes(cluster: Cluster, name: str) -> Iterator[Mistake]:
    """Yield the obstacles to running a node as several processes."""
    key, number = "gateway.processes", cluster.gateway.processes
    for engine_name, engine in cluster.engine.items():
        if name in engine.nodes:
            yield Mistake(
                key, f"is {number}, and engine {engine_name} is on node {name}: give it a node without a gateway"
            )
    for process in process_names(name, number):
        if process in cluster.node:
            yield Mistake(key, f"is {number}, which makes a node {process} of node {name}, and there is one already")
    if len(process_names(name, number)[-1]) > NAME_LENGTH_MAX:
        yield Mistake(
            key, f"adds a number to the name of node {name}, which may have {NAME_LENGTH_MAX} characters then"
        )
    section = cluster.node[name]
    for where, endpoint in (("listen", section.listen), ("metrics", section.metrics)):
        if endpoint is not None and endpoint.port and endpoint.port + number - 1 > PORT_MAX:
            yield Mistake(f"node.{name}.{where}", f"needs {number} ports from {endpoint.port} on, one for each process")


def process_names(name: str, processes: int) -> tuple[str, ...]:
    """Return the names of the nodes that replace a node of the file."""
    return tuple(f"{name}-{number}" for number in range(processes)) if processes > 1 else (name,)


def pure_gateways(cluster: Cluster) -> set[str]:
    """Return the nodes with a gateway and without engines: they need no links to each other."""
    return {*cluster.gateway_nodes}.difference(*(engine.nodes for engine in cluster.engine.values()))


def expand(cluster: Cluster) -> Cluster:
    """Return the cluster with a node for each process of a gateway; `gateway.nodes` then names them all."""
    number, gateways = cluster.gateway.processes, {*cluster.gateway_nodes}
    nodes: dict[str, NodeSection] = {}
    processes: dict[str, tuple[str, ...]] = {}
    for name, section in cluster.node.items():
        if number == 1 or name not in gateways:
            nodes[name] = section
            continue
        processes[name] = process_names(name, number)
        for index, process in enumerate(processes[name]):
            listen, metrics = _counted(section.listen, index), _counted(section.metrics, index)
            nodes[process] = evolve(section, listen=listen, metrics=metrics)
    names = tuple(process for name in cluster.gateway_nodes for process in processes.get(name, (name,)))
    gateway = evolve(cluster.gateway, nodes=names, processes=1)
    return evolve(cluster, node=nodes, gateway=gateway, processes=processes)


def _counted(endpoint: Endpoint | None, index: int) -> Endpoint | None:
    """Return an address with the port of one process; port 0 is a free one for each."""
    if endpoint is None or not endpoint.port:
        return endpoint
    return evolve(endpoint, port=endpoint.port + index)
