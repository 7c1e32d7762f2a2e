"""TLS over the simulator's socket pairs: a client's context, and the bytes with which a hostile client begins.

What OpenSSL draws at random changes bytes on the wire, but neither their number nor the order of tasks: a seed still decides all that
a trace holds.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from functools import cache

import trio

from supervisor.config.certificate import Certificate
from tests.rig import certificate

NAME = "localhost"


@cache
def server() -> ssl.SSLContext:
    """Return the gateway's context, made as the gateway makes it."""
    return Certificate(*certificate.files()).context()


@cache
def client() -> ssl.SSLContext:
    """Return a context that trusts the gateway."""
    return certificate.trusting()


def wrap(raw: trio.SocketStream) -> trio.SSLStream[trio.SocketStream]:
    """Return a client's end; it shakes hands when it is first used."""
    return trio.SSLStream(raw, client(), server_hostname=NAME, https_compatible=True)


def below(stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> trio.SocketStream:
    """Return the socket that a client's end stands on."""
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream


def hello() -> bytes:
    """Return how a client begins to shake hands."""
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        client().wrap_bio(ssl.MemoryBIO(), out, server_hostname=NAME).do_handshake()
    return out.read()
