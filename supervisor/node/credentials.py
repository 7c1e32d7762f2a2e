"""What decides who may connect to a node: read and checked as a whole before anything of the node is built.

No field has a default. A missing key or secret means "everybody may connect" to the code that compares it, so a default
would turn one forgotten line into an open cluster; a value that must be given turns it into a type error.
"""

from __future__ import annotations

import ssl

from attrs import field, frozen

from supervisor.config.tls import Certificate
from supervisor.gateway.keys import Keys
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

    @property
    def monitoring_keys(self) -> Keys:
        """The keys of the monitoring endpoint: those of clients where there are any, which know the admin's too."""
        return self.watchers if self.keys is None else self.keys
