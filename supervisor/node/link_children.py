"""The links of a node to the others, and the child that keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from protocol.link.greeting import Incarnation
from protocol.messages.cluster import Leg
from protocol.messages.embedding import Embed
from protocol.messages.generation import Generate
from protocol.messages.kind import Message
from protocol.messages.media import Encode
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.mesh import Mesh
from supervisor.cluster.workers import LocalWorker
from supervisor.config.limits import complete
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.engines.children import offers_of
from supervisor.links.serving import Service, Services
from supervisor.node.credentials import Credentials
from supervisor.runtime import Runtime
from supervisor.supervision.tree import Child
from supervisor.tensors.transfer_agent import NoTransfers, check_installed
from supervisor.tensors.transfer_road import TransferMemory

WORK: Mapping[Leg, type[Message]] = {Leg.ENCODE: Encode, Leg.EMBED: Embed}
"""The requests to workers of a leg, where these are no generations."""


def make_mesh(
    cluster: Cluster, directory: Directory, runtime: Runtime, services: Services, credentials: Credentials, run: str
) -> Mesh | None:
    """Return the mesh of a node, None if the node has no others; `run` is an id of this run of its process.

    The other nodes of the file are added to the directory. Workers of this node are served besides `services`. Raises
    `Misconfigured` if the package of the transfer engine is missing.
    """
    node = directory.name
    section = cluster.node[node]
    for name in (other for other in cluster.node if other != node):
        offers = [each for key, engine in cluster.engines_on(name).items() for each in offers_of(key, engine)]
        address = cluster.node[name].dial_address
        routes = name in cluster.gateway_nodes
        directory.configure(name, None if address is None else str(address), offers, routes=routes)
    join = cluster.cluster.join
    if section.listen is None and len(cluster.node) == 1 and not join:
        return None
    return Mesh(
        name=node,
        section=complete(LinkSettings, cluster.cluster),
        directory=directory,
        services={**_workers(directory), **services},
        listen=section.listen,
        host=section.host,
        secret=credentials.secret,
        tls=credentials.tls,
        new_nonce=runtime.new_nonce,
        chance=runtime.chance(0),
        reserve=runtime.reserve,
        incarnation=Incarnation(run, int(runtime.now())),
        join=join,
        memory=_transfer_memory(cluster, runtime),
    )


def _transfer_memory(cluster: Cluster, runtime: Runtime) -> TransferMemory | None:
    """Return the memory for tensors that other nodes read; None: all are attached. Raises `Misconfigured`."""
    if cluster.cluster.tensors != "nixl":
        return None
    try:
        check_installed()
    except NoTransfers as error:
        raise Misconfigured("cluster.tensors", f'"nixl" {error}') from error
    return TransferMemory(runtime.new_nonce)


def _workers(directory: Directory) -> Services:
    """Return the engines of a node as others ask them, by their names."""
    by_engine: dict[str, list[LocalWorker]] = {}
    for worker in directory.local.values():
        by_engine.setdefault(worker.engine_name, []).append(worker)
    return {
        (name, WORK.get(first.leg, Generate)): cast("Service", EngineService(first, others=tuple(others)))
        for name, (first, *others) in by_engine.items()
    }


def mesh_child(mesh: Mesh) -> Child:
    """Return the child that keeps the links."""
    section = mesh.section
    return Child(
        name="links",
        run=mesh.run,
        stop_within_s=2.0,
        about=f"other nodes at {mesh.listen}" if mesh.listen else "dials the other nodes",
        limits=(
            ("streams of a node", section.streams_max),
            *((f"{key} s", getattr(section, f"{key}_s")) for key in ("heartbeat", "silent", "stalled")),
        ),
    )
