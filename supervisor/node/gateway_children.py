"""The gateway of a node, and the child that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from attrs import asdict

from protocol.messages.cluster import EjectionState
from supervisor.cluster import models, operations, readiness
from supervisor.config.limits import complete
from supervisor.config.schema import Cluster
from supervisor.engines.kind import NodeContext
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.limits import CLOSE_S, GatewayLimits
from supervisor.gateway.listening import GatewayPort
from supervisor.gateway.origins import Origins
from supervisor.gateway.ports import Administration, GatewayRuntime, Probes
from supervisor.gateway.requests import RequestRunner, ServedModel
from supervisor.gateway.server import serve
from supervisor.node import monitoring
from supervisor.node.credentials import Credentials
from supervisor.node.pools import PoolView
from supervisor.supervision.tree import Child
from supervisor.version import version


def make_gateway(
    context: NodeContext,
    served: Mapping[str, ServedModel],
    pools: PoolView,
    ejections: Callable[[], tuple[EjectionState, ...]],
    credentials: Credentials,
) -> Gateway:
    """Return the gateway of a node, which serves these models."""
    assert credentials.keys is not None  # since this node has the gateway
    cluster, directory, runtime = context.cluster, context.directory, context.runtime
    section, names = cluster.gateway, tuple(cluster.model)
    never_ready = partial(readiness.never_ready, directory, names)
    return Gateway(
        runner=RequestRunner(served, runtime.metrics, section.first_token_s, section.total_s, spans=runtime.spans),
        gate=AdmissionGate(section.requests_max, section.admit_s, section.waiting_max, never_ready),
        limits=complete(GatewayLimits, section.limits),
        keys=credentials.keys,
        origins=Origins(frozenset(section.allowed_hosts), frozenset(section.allowed_origins)),
        grammars=frozenset(section.grammars),
        leave_out_tools=frozenset(section.leave_out_tools),
        keepalive_s=section.keepalive_s,
        port=GatewayPort(
            shared=len(cluster.port_sharers(directory.name)) > 1,
            certificate=credentials.certificate,
            tls=credentials.client_tls,
        ),
        runtime=GatewayRuntime(
            new_id=runtime.new_id,
            now=runtime.now,
            run_in_thread=runtime.run_in_thread,
            reserve=runtime.reserve,
            spans=runtime.spans,
        ),
        probes=Probes(
            unready=partial(readiness.unready, directory, names),
            metrics_text=partial(monitoring.cluster_metrics_text, directory, runtime.metrics),
            missing=partial(readiness.without_encoders, directory, names),
            wait_ready=partial(readiness.wait_ever_ready, directory, names),
        ),
        administration=Administration(
            server_info=partial(models.server_info, cluster, directory, version(), ejections),
            pools=pools.document,
            operate=partial(operations.operate, directory),
        ),
    )


def gateway_child(cluster: Cluster, gateway: Gateway) -> Child:
    """Return the child that runs the gateway."""
    section = cluster.gateway
    return Child(
        name="gateway",
        run=serve,
        args=(gateway, ROUTES, section.host, section.port),
        stop_within_s=CLOSE_S + 1.0,
        about=f"clients at http{'s' * bool(section.tls_certificate)}://{section.host}:{section.port}",
        limits=(
            ("requests", section.requests_max),
            ("prompt tokens", section.prompt_tokens_max),
            ("waiting", section.waiting_max),
            ("admit s", section.admit_s),
            ("first token s", section.first_token_s),
            ("total s", section.total_s),
            ("keepalive s", section.keepalive_s),
            *((key.replace("_", " "), value) for key, value in asdict(section.limits).items()),
        ),
    )
