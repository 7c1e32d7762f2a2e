"""Limits of the gateway as `cluster.toml` states them, without importing the code that enforces them."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from protocol.strict.checks import Within

Seconds = Annotated[float, Within(above=0, at_most=1_000_000)]
Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]

WILDCARD = "*"  # any host, or any origin, in a list of those that are allowed


@frozen
class GatewayLimits:
    """`[gateway.limits]`: the limits of connections; each has an error or a close code of its own."""

    connections_max: Count = 1024
    address_connections_max: Count = 256  # without a key, from one address; those from this host are not counted
    key_connections_max: Count = 256  # of one key, if the key's section has no number
    key_requests_max: Count = 192  # admitted generations of one key; its further requests wait
    head_bytes_max: Count = 32 * 1024
    body_bytes_max: Count = 4 * 1024 * 1024  # of an HTTP request, or of one WebSocket message
    backlog_bytes_max: Count = 1024 * 1024  # that a client has not read yet
    send_buffer_bytes: Count = 256 * 1024  # in the kernel, beside the backlog
    websocket_queue_max: Count = 16  # of one WebSocket: responses that wait to run, and messages that wait to be read
    websocket_lanes_max: Count = 32  # of one WebSocket
    websocket_running_max: Count = 16  # responses of one WebSocket that run at once
    history_bytes_max: Count = 8 * 1024 * 1024  # of responses that one WebSocket can continue
    # Of all clients together, beside the limits of each connection: with all of them full, a gateway fits in 1 GB.
    bodies_bytes_max: Count = 128 * 1024 * 1024  # of requests that are being read or answered, with their images
    answers_bytes_max: Count = 256 * 1024 * 1024  # of answers that are sent only once they are complete
    key_share_max: Annotated[float, Within(above=0, at_most=1)] = 0.75  # of each of these two, for one key
    histories_bytes_max: Count = 128 * 1024 * 1024  # of responses that WebSockets can continue
    backlogs_bytes_max: Count = 128 * 1024 * 1024  # that clients have not read yet
    head_s: Seconds = 10.0
    body_s: Seconds = 30.0
    idle_s: Seconds = 75.0  # between two requests of one HTTP connection
    websocket_idle_s: Seconds = 900.0  # without a message from the client or an answer to it
    stall_s: Seconds = 30.0  # without any progress of a client that has a backlog
    close_s: Seconds = 2.0
    websocket_s_max: Seconds = 3600.0  # of one WebSocket


@frozen
class TextLimits:
    """`[gateway.text]`: the limits of work on text, which runs in threads."""

    threads: Annotated[int, Within(at_least=1, at_most=64)] = 2
    waiting_max: Count = 512  # for a thread, of all owners together
    key_waiting_max: Count = 128  # for a thread, of one key, or of all clients without a key
    tokenize_tokens_max: Count = 262_144  # of one text or conversation at /tokenize, or one list at /detokenize
