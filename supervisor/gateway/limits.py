"""The limits of a gateway's connections: the keys of `[gateway.limits]`, and constants."""

from __future__ import annotations

from attrs import frozen

from supervisor.config.limits import ClientLimits

CLOSE_S = 2.0


@frozen
class GatewayLimits(ClientLimits):
    """The limits of one gateway; each has an error or a close code of its own."""

    head_bytes_max: int = 32 * 1024
    websocket_queue_max: int = 16  # of one WebSocket: responses that wait to run, and messages that wait to be read
    websocket_lanes_max: int = 32  # of one WebSocket
    websocket_running_max: int = 16  # responses of one WebSocket that run at once
    key_share_max: float = 0.75  # of `bodies_bytes_max`, and of `answers_bytes_max`, for one key
    head_s: float = 10.0
    websocket_idle_s: float = 900.0  # without a message from the client or an answer to it
    stall_s: float = 30.0  # without any progress of a client that has a backlog
    close_s: float = CLOSE_S
    websocket_s_max: float = 3600.0  # of one WebSocket
