"""The monitoring endpoint of a node: a gateway with the routes of probes and metrics alone.

It is an ordinary `Gateway`, so that the limits and keys of clients hold for its callers too. It has an address of its
own, which a firewall can keep from clients, and exists on nodes without a gateway, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio
from attrs import evolve

from protocol.messages.engine import EngineLoad
from supervisor.cluster import engine_control
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_metrics import ByEngine, cluster_metrics, local_metrics
from supervisor.cluster.operations import Engines
from supervisor.config.limits import WILDCARD
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import metrics_prefixes
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.listening import GatewayPort
from supervisor.gateway.origins import Origins
from supervisor.gateway.ports import NO_ADMINISTRATION, GatewayRuntime, Probes, nothing_missing
from supervisor.gateway.requests import RequestRunner
from supervisor.gateway.server import serve
from supervisor.links.endpoint import Endpoint
from supervisor.node.credentials import Credentials
from supervisor.runtime import Runtime
from supervisor.supervision.tree import Child
from supervisor.telemetry.engine_metrics import merge_in_steps
from supervisor.telemetry.metrics import Metrics

# Not configurable: there are few scrapers and probes, their requests are small, and none of them is a client.
LIMITS = evolve(
    GatewayLimits(), connections_max=64, key_connections_max=64, body_bytes_max=1024, head_s=5.0, body_s=5.0
)


def make_monitoring(
    cluster: Cluster, directory: Directory, gateway: Gateway | None, runtime: Runtime, credentials: Credentials
) -> Gateway | None:
    """Return the monitoring endpoint of a node, None if the file names no address for it."""
    if cluster.node[directory.name].metrics is None:
        return None
    is_unready: Callable[[], str | None]
    if gateway is None:
        engines: Engines = {f"{worker.node}/{worker.engine_name}": worker.engine for worker in directory.local.values()}
        is_unready = partial(unready, cluster, directory)
        text: Callable[[], Awaitable[bytes]] = partial(local_metrics_text, engines, runtime.metrics)
    else:
        is_unready, text = partial(gateway_unready, directory, gateway), gateway.probes.metrics_text
    return Gateway(
        runner=RequestRunner({}, runtime.metrics, LIMITS.head_s, LIMITS.head_s),
        gate=AdmissionGate(1, LIMITS.head_s, 1, lambda: None),
        limits=LIMITS,
        keys=credentials.monitoring_keys,
        origins=Origins(frozenset({WILDCARD})),
        port=GatewayPort(),
        runtime=GatewayRuntime(new_id=runtime.new_id, now=runtime.now, reserve=runtime.reserve),
        probes=Probes(
            unready=is_unready,
            metrics_text=text,
            missing=nothing_missing if gateway is None else gateway.probes.missing,
        ),
        administration=NO_ADMINISTRATION,
    )


def monitoring_child(address: Endpoint | None, endpoint: Gateway) -> Child:
    """Return the child that runs the monitoring endpoint at an address."""
    assert address is not None  # else there is no endpoint
    return Child(
        name="metrics",
        run=serve,
        args=(endpoint, ROUTES.probes(), address.host, address.port),
        stop_within_s=LIMITS.close_s + 1.0,
        about=f"numbers at http://{address}/metrics; probes at /health and /ready",
        limits=(("connections", LIMITS.connections_max),),
    )


def gateway_unready(directory: Directory, gateway: Gateway) -> str | None:
    """Return why a gateway is not ready, None if it is."""
    return "the node drains" if directory.draining else gateway.why_unready()


def unready(cluster: Cluster, directory: Directory) -> str | None:
    """Return why a node without a gateway is not ready, None if it is."""
    if directory.draining:
        return "the node drains"
    if (conflict := directory.name_conflict) is not None:
        return conflict
    for worker in directory.local.values():
        if worker.engine.current is None:
            return f"engine {worker.engine_name} {worker.engine.status_text}"
    gateways = cluster.gateway_nodes
    if any(directory.node(name).link is not None for name in gateways):
        return None
    return f"there is no link to node{'s' * (len(gateways) > 1)} {', '.join(gateways)}"


async def local_metrics_text(engines: Engines, metrics: Metrics) -> bytes:
    """Return the metrics of this node, with the loads of its engines and their own metrics."""
    return await _text(metrics, partial(engine_control.local_loads, engines), partial(local_metrics, engines))


async def cluster_metrics_text(directory: Directory, metrics: Metrics) -> bytes:
    """Return the metrics with the loads of all engines of the cluster and their own metrics.

    Nodes that have been forgotten are left out.
    """
    metrics.retain_nodes({directory.name, *directory.nodes})
    return await _text(metrics, partial(engine_control.cluster_loads, directory), partial(cluster_metrics, directory))


async def _text(
    metrics: Metrics, loads: Callable[[], Awaitable[dict[str, EngineLoad]]], own: Callable[[], Awaitable[ByEngine]]
) -> bytes:
    """Return the metrics of a node and of engines; the engines' loads and metrics are requested concurrently."""
    loaded: dict[str, EngineLoad] = {}

    async def load() -> None:
        loaded.update(await loads())

    async with metrics.scrapes:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            reported = await own()
        text, left_out = await merge_in_steps(reported, metrics_prefixes())
    return await metrics.render_in_steps(loaded, left_out) + text
