"""The request by which an HTTP connection becomes a WebSocket (RFC 6455, section 4)."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha1

from attrs import frozen

from protocol.dialects.targets import NO_TARGETS, Targets, targets_of
from supervisor.gateway.http.exchange import Exchange

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # proves that the server has read the handshake (section 1.3)
HANDSHAKE = (b"connection", b"upgrade", b"sec-websocket-key", b"sec-websocket-version")


@frozen
class UpgradeHandshake:
    """A valid handshake: the whole response that accepts it, its request target, and the bytes behind it."""

    response: bytes
    target: str
    unread: bytes
    targets: Targets = NO_TARGETS  # of requests that name none


def wants_websocket(exchange: Exchange) -> bool:
    """Whether a request asks for a WebSocket, in a valid handshake or not."""
    return exchange.header(b"upgrade").lower() == b"websocket" and exchange.method == "GET"


def is_handshake(exchange: Exchange) -> bool:
    """Whether a request is a valid WebSocket handshake, without headers that could be read in two ways."""
    if exchange.request is None:
        return False
    names = [name for name, _ in exchange.request.headers]
    if any(names.count(name) != 1 for name in HANDSHAKE):
        return False  # of two equal ones the library reads the last, and `Exchange.header` joins both
    tokens = {token.strip().lower() for token in exchange.header(b"connection").split(b",")}
    return (
        exchange.request.http_version >= b"1.1"
        and b"upgrade" in tokens
        and bool(exchange.header(b"sec-websocket-key"))
        and exchange.header(b"sec-websocket-version") == b"13"
        and exchange.header(b"content-length") in {b"", b"0"}
        and not exchange.header(b"transfer-encoding")
    )


def handshake_of(exchange: Exchange, unread: bytes) -> UpgradeHandshake:
    """Return a request that `is_handshake`, and is granted no extension or subprotocol; `unread` came behind it.

    Raises `BadRequest` for a header with targets that is wrong.
    """
    assert exchange.request is not None
    proof = b64encode(sha1(exchange.header(b"sec-websocket-key") + GUID, usedforsecurity=False).digest())
    lines = (
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-accept: %b" % proof,
        b"x-request-id: %b" % exchange.request_id.encode(),
    )
    response, target = b"\r\n".join(lines) + b"\r\n\r\n", exchange.request.target.decode("latin-1")
    return UpgradeHandshake(response, target, unread, targets_of(exchange.request.values))
