"""The credentials of a node, which decide who may connect to it: read and checked before the node is assembled.

No field has a default. A missing key or secret means "everybody may connect" to the code that compares it, so a default
would turn one forgotten line into an open cluster; a value that must be given turns it into a type error.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from attrs import field, frozen

from supervisor.cluster import link_credentials
from supervisor.config.certificate import Certificate
from supervisor.config.limits import ClientLimits
from supervisor.config.schema import Cluster
from supervisor.gateway.keys import client_keys
from supervisor.gateway.keys.keys import Keys
from supervisor.links.tls import LinkTls


@frozen(kw_only=True)
class Credentials:
    """The credentials of one node, for its links, its gateway and its monitoring endpoint."""

    secret: bytes = field(repr=False)  # of the cluster; empty: links are open, which only loopback allows
    tls: LinkTls | None  # of links; None: plain
    keys: Keys | None  # of clients; None: this node has no gateway
    watchers: Keys  # of those who may read the metrics of a node without a gateway
    certificate: Certificate | None  # of the gateway; None: plain HTTP
    client_tls: ssl.SSLContext | None  # made from `certificate`

    def kept_slots(self, limits: ClientLimits) -> int:
        """Return how many slots of a model one key leaves to others: none unless there are several keys of clients."""
        return limits.kept_slots if self.keys is not None and self.keys.several else 0

    @property
    def monitoring_keys(self) -> Keys:
        """The keys of the monitoring endpoint: those of clients, with admin keys among them, if this node has them."""
        return self.watchers if self.keys is None else self.keys


def read_credentials(cluster: Cluster, name: str, environment: Mapping[str, str]) -> Credentials:
    """Return the credentials of a node; raises `StartFailed` if any cannot be read or would let everybody in."""
    has_gateway = name in cluster.gateway_nodes
    certificate = cluster.certificate if has_gateway else None
    return Credentials(
        keys=client_keys.client_keys(cluster, environment) if has_gateway else None,
        watchers=client_keys.metrics_keys(cluster, name, environment),
        secret=link_credentials.cluster_secret(cluster, environment),
        tls=link_credentials.link_tls(cluster),
        certificate=certificate,
        client_tls=None if certificate is None else certificate.context(),
    )
