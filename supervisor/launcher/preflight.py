"""Checks before the start of nodes, for failures that would otherwise come seconds later."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import StartFailed
from supervisor.config.schema import Cluster, EngineSection
from supervisor.engines.kinds import check_host
from supervisor.files import model_folder
from supervisor.launcher.host_memory import available_bytes
from supervisor.node import descriptor_needs
from supervisor.sockets.bound_sockets import bind_all, resolve

ENGINE_BYTES = 700 * 1024 * 1024  # an engine's processes without weights; memory shared by a zygote counts once


def check_can_start(cluster: Cluster, *names: str) -> None:
    """Raise `StartFailed`, in one sentence, if these nodes could not start here."""
    for name in (name for name in names if name in cluster.gateway_nodes):
        # Gateways that share the port may run already. If all of them are started now, a used port is a stranger's.
        shared = not {*cluster.port_sharers(name)} <= {*names}
        check_port(cluster.gateway.host, cluster.gateway.port, "gateway.port", shared=shared)
    for name in names:
        if (listen := cluster.node[name].listen) is not None:
            check_port(listen.host, listen.port, f"node.{name}.listen")
        if (metrics := cluster.node[name].metrics) is not None:
            check_port(metrics.host, metrics.port, f"node.{name}.metrics")
        for key, engine in cluster.engines_on(name).items():
            for its, port in engine.fixed_ports.items():
                check_port("0.0.0.0", port, f"engine.{key}.{its}")  # noqa: S104  # at every address, as SGLang has it
            for its, at in engine.events.endpoints.items():
                check_port(at.host, at.port, f"engine.{key}.events.{its}")
        descriptor_needs.check_limit(cluster, name)
    check_host(cluster, *names)
    _check_memory(cluster, names)


def check_port(host: str, port: int, key: str, *, shared: bool = False) -> None:
    """Raise `StartFailed`, with the key of the port, if it cannot be bound; `shared`: beside other gateways."""
    try:
        for bound in bind_all(resolve(host), port, shared=shared):
            bound.close()
    except OSError as error:
        why = error.strerror or error
        place = host or "every address"
        raise StartFailed(f"port {port} of {place} cannot be had: {why}; name another as {key}") from error


def _check_memory(cluster: Cluster, names: Sequence[str]) -> None:
    """Raise `StartFailed` if the engines on the CPU need more memory than is available."""
    engines = [engine for name in names for engine in cluster.engine.values() if name in engine.nodes]
    on_cpu = [engine for engine in engines if engine.in_host_memory]
    needed = sum(ENGINE_BYTES + _weights(cluster, engine) // len(engine.nodes) for engine in on_cpu)
    available = available_bytes()
    if available is not None and needed > available:
        raise StartFailed(
            f"too little memory: {len(on_cpu)} engines on the CPU need about {needed / 2**30:.1f} GiB,"
            f" and {available / 2**30:.1f} GiB are available"
        )


def _weights(cluster: Cluster, engine: EngineSection) -> int:
    files = model_folder.loaded_weights(cluster.model_path(engine.model), engine.weights)
    return sum(file.stat().st_size for file in files)
