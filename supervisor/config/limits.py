"""Limits that stand in the configuration and are kept elsewhere; this module imports none of those who keep them."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from protocol.dialects.options import Within

Seconds = Annotated[float, Within(above=0, at_most=1_000_000)]
Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]

WILDCARD = "*"  # among hosts and origins that are allowed: any


@frozen
class GatewayLimits:
    """`[gateway.limits]`: every limit of connections; one that is reached is a clear error or a clear close code."""

    connections_max: Count = 1024
    address_connections_max: Count = 256  # of one address that have presented no key; this host's own do not count
    key_connections_max: Count = 256  # of one key that names no number of its own
    key_requests_max: Count = 192  # generations of one key inside at once; beyond that its requests wait
    head_bytes_max: Count = 32 * 1024
    body_bytes_max: Count = 4 * 1024 * 1024  # of an HTTP request, or of one WebSocket message
    backlog_bytes_max: Count = 1024 * 1024  # that a client has not read yet
    send_buffer_bytes: Count = 256 * 1024  # in the kernel, beside the backlog
    websocket_queue_max: Count = (
        16  # responses that wait for their turn on one WebSocket, and messages that wait to be read
    )
    websocket_lanes_max: Count = 32  # of one WebSocket
    websocket_running_max: Count = 16  # responses that are being answered at once on one WebSocket
    history_bytes_max: Count = 8 * 1024 * 1024  # of conversations that one WebSocket can continue
    # Of all clients together, whatever each connection may have: a gateway of 1 GB survives all of them full.
    bodies_bytes_max: Count = 64 * 1024 * 1024  # of requests that are being read or answered
    answers_bytes_max: Count = 256 * 1024 * 1024  # of answers that are kept until they are whole
    key_share_max: Annotated[float, Within(above=0, at_most=1)] = 0.75  # of each of these two, that one key may hold
    histories_bytes_max: Count = 128 * 1024 * 1024  # that can be continued
    backlogs_bytes_max: Count = 128 * 1024 * 1024  # that clients have not read yet
    head_s: Seconds = 10.0
    body_s: Seconds = 30.0
    idle_s: Seconds = 75.0  # between two requests of one HTTP connection
    websocket_idle_s: Seconds = 900.0  # that nothing is said on a WebSocket, and nothing answered
    stall_s: Seconds = 30.0  # that a client with a backlog may read nothing
    close_s: Seconds = 2.0
    websocket_s_max: Seconds = 3600.0  # of one WebSocket


@frozen
class TextLimits:
    """`[gateway.text]`: what reading and writing text may take beside the event loop."""

    threads: Annotated[int, Within(at_least=1, at_most=64)] = 2
    waiting_max: Count = 512  # for a thread, of all owners together
    key_waiting_max: Count = 128  # of one owner: a key, or all that come without one
    tokenize_tokens_max: Count = 262_144  # of one text or conversation at /tokenize, of one list at /detokenize
