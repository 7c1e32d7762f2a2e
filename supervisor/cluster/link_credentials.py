"""The credentials of links: the cluster's secret and the nodes' certificates.

A cluster whose nodes listen beyond loopback must have one of the two. A mistake raises `Misconfigured`, with the key of
cluster.toml: a node rather does not start than accept links from strangers. On loopback the strangers are the other
users of the machine, so the nodes that one launcher starts share a secret that it made at its own start.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from protocol.link.greeting import names_node, shown_names
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.config.sections import LOOPBACK_HOSTS
from supervisor.files import permissions, reading
from supervisor.links.tls import LinkTls, load_link_tls

SECRET = "ESPALIER_CLUSTER_SECRET"  # noqa: S105  # the name of an environment variable
START_SECRET = "ESPALIER_START_SECRET"  # noqa: S105  # a launcher's, for its nodes alone
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 64 * 1024


def cluster_secret(cluster: Cluster, environment: Mapping[str, str]) -> bytes:
    """Return the secret of the cluster, else the one that this node's launcher made, empty if there is neither.

    Raises `Misconfigured` where nodes of other machines could not link, or anybody could.
    """
    section = cluster.cluster
    secret = (environment.get(SECRET) or _secret_in_file(cluster)).strip().encode()
    if (secret or section.secret is not None) and len(secret) < SECRET_BYTES_MIN:
        detail = f"the cluster's secret has {len(secret)} bytes; take {SECRET_BYTES_MIN} or more"
        raise Misconfigured("cluster.secret", detail)
    listening = [(f"node.{name}.listen", node.listen) for name, node in cluster.node.items() if node.listen]
    joined = [(f"cluster.join[{number}]", endpoint) for number, endpoint in enumerate(section.join)]
    outside = [(key, endpoint) for key, endpoint in (*listening, *joined) if endpoint.host not in LOOPBACK_HOSTS]
    if not secret and section.tls_authority is None and outside:
        key, endpoint = outside[0]
        detail = f"{endpoint} is not loopback, so links need a secret: name its file as cluster.secret, or set {SECRET}"
        raise Misconfigured(key, detail)
    return secret or environment.get(START_SECRET, "").encode()


def start_secret(cluster: Cluster, environment: Mapping[str, str], made: str) -> dict[str, str]:
    """Return the variable with a launcher's secret for its nodes; none where the file decides who may link.

    Nodes that join others, which have no secret, cannot have one either. Raises `Misconfigured` as `cluster_secret`.
    """
    section = cluster.cluster
    decided = cluster_secret(cluster, environment) or section.tls_authority is not None or section.join
    return {} if decided else {START_SECRET: made}


def _secret_in_file(cluster: Cluster) -> str:
    if (name := cluster.cluster.secret) is None:
        return ""
    file = cluster.folder / name
    try:
        if (reason := permissions.writable_by_others(file)) is not None:
            raise Misconfigured("cluster.secret", reason)
        return reading.read(file, SECRET_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured("cluster.secret", f"the cluster's secret cannot be read: {error}") from error


def link_tls(cluster: Cluster) -> LinkTls | None:
    """Return the certificates of this node's links, None for plain links; raises `Misconfigured` for unusable files."""
    section = cluster.cluster
    if section.tls_certificate is None or section.tls_key is None or section.tls_authority is None:
        return None
    names = (section.tls_certificate, section.tls_key, section.tls_authority)
    certificate, key, authority = (cluster.folder / name for name in names)
    try:
        reading.require_regular_files(certificate, key, authority)
        return load_link_tls(certificate, key, authority)
    except (OSError, ssl.SSLError) as error:
        detail = f"the certificates of [cluster] cannot be used: {error}"
        raise Misconfigured("cluster.tls_certificate", detail) from error


def check_certificate_names(cluster: Cluster, name: str, tls: LinkTls | None) -> None:
    """Raise `Misconfigured` if this node's certificate must name it and does not: no other node would accept it."""
    own = None if tls is None or not cluster.cluster.verifies_node_names else tls.names
    if own is not None and not names_node(own, name, cluster.cluster.name):
        detail = f'names {shown_names(own)}, and must name node {name} with tls_names = "nodes": DNS:{name}, say'
        raise Misconfigured("cluster.tls_certificate", f"{cluster.cluster.tls_certificate} {detail}")
