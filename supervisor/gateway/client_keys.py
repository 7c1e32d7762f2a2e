"""The keys that a configuration names: those of clients, and those that may read metrics."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.errors import StartFailed
from supervisor.config.limits import WILDCARD
from supervisor.config.load import LOOPBACK_HOSTS, Cluster, Misconfigured
from supervisor.gateway.keys import ADMIN, KEYS, Keys, KeySources


def client_keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of clients; raises `StartFailed` if they cannot be read, or if there must be some and are not."""
    known = read_keys(cluster, environment)
    check_client_keys(cluster, known)
    return known


def check_client_keys(cluster: Cluster, known: Keys) -> None:
    """Raise `StartFailed` if everybody could come in from other hosts or pages, or nobody at all."""
    section = cluster.gateway
    where = f"name a file of them as gateway.keys, or set {KEYS}"
    if not known.wanted:
        if section.host not in LOOPBACK_HOSTS:
            raise Misconfigured(
                "gateway.host", f"gateway.host {section.host} is not loopback, so clients need keys: {where}"
            )
        for key in ("allowed_hosts", "allowed_origins"):
            if WILDCARD in getattr(section, key):
                said = f'gateway.{key} = ["{WILDCARD}"] opens this server to every web page without keys: {where}'
                raise Misconfigured(f"gateway.{key}", said)
    elif not known.names(admin=False) and not known.names(admin=True):
        raise Misconfigured("gateway.keys", f"there is no key, so nobody could come in: {where}")


def metrics_keys(cluster: Cluster, name: str, environment: Mapping[str, str]) -> Keys:
    """Return the keys of who may read a node's numbers; raises `StartFailed` if other hosts could without one."""
    known = read_keys(cluster, environment)
    check_metrics_keys(cluster, name, known)
    return known


def check_metrics_keys(cluster: Cluster, name: str, known: Keys) -> None:
    """Raise `StartFailed` if other hosts could read a node's numbers without a key."""
    at = cluster.node[name].metrics
    if at is not None and at.host not in LOOPBACK_HOSTS and not known.names(admin=True):
        raise Misconfigured(
            f"node.{name}.metrics",
            f"node.{name}.metrics {at} is not loopback, so whoever reads /metrics needs an admin's key: set {ADMIN},"
            " or say admin = true of a key in the file gateway.keys",
        )


def read_keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of a file and of the environment; raises `StartFailed` if they cannot be read."""
    known = Keys(KeySources(cluster.keys, {name: environment[name] for name in (KEYS, ADMIN) if name in environment}))
    try:
        known.load()
    except StartFailed as error:
        raise Misconfigured("gateway.keys", str(error)) from error
    return known
