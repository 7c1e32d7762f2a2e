"""The settings of a node's links: the configured ones of `[cluster]`, and constant times and limits."""

from __future__ import annotations

from attrs import frozen

from protocol.link.frames import ATTACHED_BYTES_MAX
from supervisor.config.sections import ClusterSection
from supervisor.links.websocket import HANDSHAKE_S

HANDSHAKES_MAX = 32


@frozen(kw_only=True)
class LinkSettings(ClusterSection):
    """The settings of the links of one node."""

    attached_bytes_max: int = ATTACHED_BYTES_MAX  # of tensors that are on their way to a node over one link
    handshake_s: float = HANDSHAKE_S
    handshakes_max: int = HANDSHAKES_MAX  # incoming connections at a time whose greeting has not ended
    announce_s: float = 0.1  # between two announcements of a node's load
    announcements_max: int = 500  # of load, a second, from all nodes together to one that routes
    retry_min_s: float = 0.1  # between two attempts to reach a node
    retry_max_s: float = 5.0
