"""Where a node is watched: a small door of its own, for probes and scrapers alone.

It is the gateway's door with three of its paths, so that whoever knocks here meets the same limits and the same keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from attrs import evolve

from supervisor.cluster import engine_control
from supervisor.cluster.directory import Directory
from supervisor.config.limits import WILDCARD, GatewayLimits
from supervisor.config.load import LOOPBACK_HOSTS, Cluster
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.keys import Keys
from supervisor.gateway.origins import Origins
from supervisor.gateway.requests import RequestRunner
from supervisor.gateway.server import serve
from supervisor.links.websocket import Endpoint
from supervisor.runtime import Runtime
from supervisor.supervision.tree import Child
from supervisor.telemetry.metrics import Metrics

# Constants: whoever scrapes or probes is one or a few, asks for little, and is not a client.
LIMITS = evolve(
    GatewayLimits(), connections_max=64, key_connections_max=64, body_bytes_max=1024, head_s=5.0, body_s=5.0
)


def door(
    at: Endpoint,
    world: Runtime,
    keys: Keys,
    unready: Callable[[], str | None],
    text: Callable[[], Awaitable[bytes]],
) -> Gateway:
    """Return a node's own door; on loopback it answers to loopback's names alone, since keys need not be there."""
    return Gateway(
        runner=RequestRunner({}, world.metrics, LIMITS.head_s, LIMITS.head_s),
        gate=AdmissionGate(1, LIMITS.head_s, 1, lambda: None),
        limits=LIMITS,
        keys=keys,
        certificate=None,
        tls=None,
        reserve=world.reserve,
        origins=Origins(frozenset({*LOOPBACK_HOSTS, at.host.lower()} if at.host in LOOPBACK_HOSTS else {WILDCARD})),
        unready=unready,
        metrics_text=text,
        new_id=world.new_id,
        now=world.now,
    )


def child(at: Endpoint, opened: Gateway) -> Child:
    """Return what keeps the door."""
    return Child(
        name="metrics",
        run=serve,
        args=(opened, ROUTES.probes(), at.host, at.port),
        stop_within_s=LIMITS.close_s + 1.0,
        about=f"numbers at http://{at}/metrics; probes at /health and /ready",
        limits=(("connections", LIMITS.connections_max),),
    )


def unready(cluster: Cluster, directory: Directory) -> str | None:
    """Say why a node without a gateway cannot do its work at the moment."""
    if directory.draining:
        return "the node drains"
    if (twin := directory.name_conflict) is not None:
        return twin
    for name, each in directory.local.items():
        if each.engine.current is None:
            return f"engine {name} {each.engine.status_text}"
    front = cluster.gateway.node
    link = directory.node(front).link
    return f"there is no link to node {front}" if link is None else None


async def local_metrics_text(engines: engine_control.Engines, metrics: Metrics) -> bytes:
    """Return the metrics with the load of each engine of this node, as `local_loads` returns it."""
    return await metrics.render_in_steps(await engine_control.local_loads(engines))


async def cluster_metrics_text(directory: Directory, metrics: Metrics) -> bytes:
    """Return the metrics with the load of each engine of the cluster, and without nodes that have been forgotten."""
    metrics.retain_nodes({directory.name, *directory.nodes})
    return await metrics.render_in_steps(await engine_control.cluster_loads(directory))
