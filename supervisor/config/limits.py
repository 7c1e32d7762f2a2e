"""Limits of the gateway as `cluster.toml` states them, without importing the code that enforces them."""

from __future__ import annotations

from typing import Annotated, TypeVar

import attrs
from attrs import frozen

from protocol.strict.checks import Within

Seconds = Annotated[float, Within(above=0, at_most=1_000_000)]
Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]

WILDCARD = "*"  # any host, or any origin, in a list of those that are allowed


@frozen
class ClientLimits:
    """`[gateway.limits]`: the limits of connections and of memory; each has an error or a close code of its own."""

    connections_max: Count = 1024
    address_connections_max: Count = 256  # without a key, from one address; those from this host are not counted
    key_connections_max: Count = 256  # of one key, if the key's section has no number
    key_requests_max: Count = 192  # admitted generations of one key; its further requests wait
    body_bytes_max: Count = 4 * 1024 * 1024  # of an HTTP request, or of one WebSocket message
    backlog_bytes_max: Count = 1024 * 1024  # that a client has not read yet
    send_buffer_bytes: Count = 256 * 1024  # in the kernel, beside the backlog
    history_bytes_max: Count = 8 * 1024 * 1024  # of responses that one WebSocket can continue
    # Of all clients together, beside the limits of each connection: with all of them full, a gateway fits in 1 GB.
    bodies_bytes_max: Count = 128 * 1024 * 1024  # of requests that are being read or answered, with their images
    answers_bytes_max: Count = 256 * 1024 * 1024  # of answers that are sent only once they are complete
    histories_bytes_max: Count = 128 * 1024 * 1024  # of responses that WebSockets can continue
    backlogs_bytes_max: Count = 128 * 1024 * 1024  # that clients have not read yet
    body_s: Seconds = 30.0
    idle_s: Seconds = 75.0  # between two requests of one HTTP connection


L = TypeVar("L", bound=attrs.AttrsInstance)


def complete(limits: type[L], section: attrs.AttrsInstance) -> L:
    """Return limits of a class that adds constants to the keys of a section."""
    return limits(**{field.name: getattr(section, field.name) for field in attrs.fields(type(section))})
