"""Limits of the gateway in `cluster.toml`, without imports of the code that enforces them."""

from __future__ import annotations

from typing import Annotated, TypeVar

import attrs
from attrs import frozen

from protocol.strict.checks import Within

Seconds = Annotated[float, Within(above=0, at_most=1_000_000)]
Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]
Bytes = Annotated[int, Within(at_least=1, at_most=2**50)]

WILDCARD = "*"  # any host, or any origin, in a list of allowed ones


@frozen
class ClientLimits:
    """`[gateway.limits]`: the limits of connections and of memory; each has an error or a close code of its own.

    With all four limits for all clients together full, a gateway fits in 1 GB.
    """

    connections_max: Count = 1024  # connections at a time; beyond them the oldest one without a key is closed
    # connections without a key from one address other than this machine's; beyond them its oldest is closed
    address_connections_max: Count = 256
    # connections of one key whose section has no `connections_max`; further ones are refused
    key_connections_max: Count = 256
    key_requests_max: Count = 192  # admitted generations of one key; its further requests wait
    # slots of a model that one key leaves to others, if the file has several keys without `admin`; 0: none
    kept_slots: Annotated[int, Within(at_least=0, at_most=1_000_000)] = 1
    # longest body of an HTTP request, or WebSocket message; longer ones get `too_large`
    body_bytes_max: Bytes = 4 * 1024 * 1024
    # unread bytes of one client; beyond them it is disconnected (`slow_client`)
    backlog_bytes_max: Bytes = 1024 * 1024
    send_buffer_bytes: Count = 256 * 1024  # the kernel's send buffer of a connection, beside that backlog
    # responses that one WebSocket can continue, with their images; longer conversations are not kept
    history_bytes_max: Bytes = 8 * 1024 * 1024
    # memory for requests of all clients that are read or answered, with their images; further ones get `overloaded`
    bodies_bytes_max: Bytes = 128 * 1024 * 1024
    # memory for answers of all clients that are sent only when whole; further such requests get `overloaded`
    answers_bytes_max: Bytes = 256 * 1024 * 1024
    # memory for responses that all WebSockets can continue; then the key with the most loses its oldest
    histories_bytes_max: Bytes = 128 * 1024 * 1024
    # unread bytes of all clients; beyond half of it a client with more than an equal share of the rest is disconnected
    backlogs_bytes_max: Bytes = 128 * 1024 * 1024
    body_s: Seconds = 30.0  # longest time for a body to arrive; then the request gets status 408
    idle_s: Seconds = 75.0  # longest time between two requests of an HTTP connection; then it is closed


L = TypeVar("L", bound=attrs.AttrsInstance)


def complete(limits: type[L], section: attrs.AttrsInstance) -> L:
    """Return limits from the keys of a section and the constants of their class."""
    return limits(**{field.name: getattr(section, field.name) for field in attrs.fields(type(section))})
