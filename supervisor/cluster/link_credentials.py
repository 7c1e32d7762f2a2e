"""What nodes prove themselves to each other with: the cluster's secret and the certificates of its links."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from protocol.greeting import names_node, shown_names
from supervisor.config.load import LOOPBACK_HOSTS, Cluster, Misconfigured
from supervisor.files import permissions, reading
from supervisor.links.tls import LinkTls, load_link_tls

SECRET = "ESPALIER_CLUSTER_SECRET"  # noqa: S105  # the name of a variable
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 64 * 1024


def cluster_secret(cluster: Cluster, environment: Mapping[str, str]) -> bytes:
    """Return what this cluster's nodes know; raises `StartFailed` where anybody could link without it."""
    section = cluster.cluster
    found = (environment.get(SECRET) or _secret_in_file(cluster)).strip().encode()
    if (found or section.secret is not None) and len(found) < SECRET_BYTES_MIN:
        said = f"the cluster's secret has {len(found)} bytes; take {SECRET_BYTES_MIN} or more"
        raise Misconfigured("cluster.secret", said)
    listening = [(f"node.{name}.listen", node.listen) for name, node in cluster.node.items() if node.listen]
    joined = [(f"cluster.join[{number}]", at) for number, at in enumerate(section.join)]
    outside = [(key, at) for key, at in (*listening, *joined) if at.host not in LOOPBACK_HOSTS]
    if not found and section.tls_authority is None and outside:
        key, at = outside[0]
        said = f"{at} is not loopback, so links need a secret: name a file of it as cluster.secret, or set {SECRET}"
        raise Misconfigured(key, said)
    return found


def _secret_in_file(cluster: Cluster) -> str:
    if (name := cluster.cluster.secret) is None:
        return ""
    file = cluster.folder / name
    try:
        if (why := permissions.writable_by_others(file)) is not None:
            raise Misconfigured("cluster.secret", why)
        return reading.read(file, SECRET_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured("cluster.secret", f"cluster.secret cannot be read: {error}") from error


def link_tls(cluster: Cluster) -> LinkTls | None:
    """Return how nodes show each other who they are, None for plain links; raises `StartFailed` for unusable files."""
    section = cluster.cluster
    if section.tls_certificate is None or section.tls_key is None or section.tls_authority is None:
        return None
    names = (section.tls_certificate, section.tls_key, section.tls_authority)
    certificate, key, authority = (cluster.folder / name for name in names)
    try:
        reading.require_regular_files(certificate, key, authority)
        return load_link_tls(certificate, key, authority)
    except (OSError, ssl.SSLError) as error:
        said = f"the certificates of [cluster] cannot be used: {error}"
        raise Misconfigured("cluster.tls_certificate", said) from error


def check_certificate_names(cluster: Cluster, name: str, tls: LinkTls | None) -> None:
    """Raise `Misconfigured` if this node's certificate must name it, and does not: no other node would take it."""
    own = None if tls is None or not cluster.cluster.verifies_node_names else tls.names
    if own is not None and not names_node(own, name, cluster.cluster.name):
        said = f'names {shown_names(own)}, and must name node {name} with tls_names = "nodes": DNS:{name}, say'
        raise Misconfigured("cluster.tls_certificate", f"{cluster.cluster.tls_certificate} {said}")
