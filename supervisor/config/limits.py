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
    """`[gateway.limits]`: the limits of connections and of memory; each has an error or a close code of its own.

    With all four limits for all clients together full, a gateway fits in 1 GB.
    """

    connections_max: Count = 1024  # connections at a time
    address_connections_max: Count = 256  # connections without a key from one address, but from this host
    key_connections_max: Count = 256  # connections of one key, if the key's section has no number
    key_requests_max: Count = 192  # admitted generations of one key; its further requests wait
    body_bytes_max: Count = 4 * 1024 * 1024  # bytes of the body of an HTTP request, or of one WebSocket message
    backlog_bytes_max: Count = 1024 * 1024  # bytes that one client has not read yet
    send_buffer_bytes: Count = 256 * 1024  # bytes of a connection's buffer in the kernel, beside the backlog
    history_bytes_max: Count = 8 * 1024 * 1024  # bytes of responses that one WebSocket can continue
    bodies_bytes_max: Count = 128 * 1024 * 1024  # bytes of all requests that are read or answered, with their images
    answers_bytes_max: Count = 256 * 1024 * 1024  # bytes of all answers that are sent only once they are complete
    histories_bytes_max: Count = 128 * 1024 * 1024  # bytes of all responses that WebSockets can continue
    backlogs_bytes_max: Count = 128 * 1024 * 1024  # bytes that all clients together have not read yet
    body_s: Seconds = 30.0  # seconds in which a body must have come
    idle_s: Seconds = 75.0  # seconds between two requests of one HTTP connection


L = TypeVar("L", bound=attrs.AttrsInstance)


def complete(limits: type[L], section: attrs.AttrsInstance) -> L:
    """Return limits of a class that adds constants to the keys of a section."""
    return limits(**{field.name: getattr(section, field.name) for field in attrs.fields(type(section))})
