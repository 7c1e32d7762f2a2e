"""The keys of a configuration, and the check that they suffice for the addresses of a node.

A server that other machines or foreign web pages can reach must not be open by mistake. So a node does not start if its
gateway could be used without a key from anywhere but this machine, if its metrics could be read so, or if keys are
wanted and there is none. Each check is a function of its own, because `preview` runs them for all nodes at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.errors import StartFailed
from supervisor.config.limits import WILDCARD
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.config.sections import LOOPBACK_HOSTS
from supervisor.gateway.keys.key_sources import ADMIN, KEYS, KeySources
from supervisor.gateway.keys.keys import Keys


def client_keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of a gateway; raises `StartFailed` if they cannot be read or do not suffice."""
    keys = read_keys(cluster, environment)
    check_client_keys(cluster, keys)
    return keys


def check_client_keys(cluster: Cluster, keys: Keys) -> None:
    """Raise `StartFailed` if other hosts or pages could use the gateway without a key."""
    section = cluster.gateway
    remedy = f"name a file of them as gateway.keys, or set {KEYS}"
    if keys.wanted:
        return
    if section.host not in LOOPBACK_HOSTS:
        raise Misconfigured("gateway.host", f"{section.host} is not loopback, so clients need keys: {remedy}")
    for field in ("allowed_hosts", "allowed_origins"):
        if WILDCARD in getattr(section, field):
            mistake = f'"{WILDCARD}" opens this server to every web page without keys: {remedy}'
            raise Misconfigured(f"gateway.{field}", mistake)


def metrics_keys(cluster: Cluster, name: str, environment: Mapping[str, str]) -> Keys:
    """Return the keys of a node's metrics; raises `StartFailed` if other hosts could read them without a key."""
    keys = read_keys(cluster, environment)
    check_metrics_keys(cluster, name, keys)
    return keys


def check_metrics_keys(cluster: Cluster, name: str, keys: Keys) -> None:
    """Raise `StartFailed` if other hosts could read a node's metrics without a key."""
    endpoint = cluster.node[name].metrics
    if endpoint is not None and endpoint.host not in LOOPBACK_HOSTS and not keys.names(admin=True):
        raise Misconfigured(
            f"node.{name}.metrics",
            f"{endpoint} is not loopback, so reading /metrics takes an admin key: set {ADMIN},"
            " or admin = true for a key in the file gateway.keys",
        )


def read_keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of a cluster's file and of the environment; raises `StartFailed` if they cannot be read."""
    variables = {name: environment[name] for name in (KEYS, ADMIN) if name in environment}
    keys = Keys(KeySources(cluster.keys, variables), gateways=len(cluster.gateway_nodes))
    try:
        keys.load()
    except StartFailed as error:
        raise Misconfigured("gateway.keys", str(error)) from error
    return keys
