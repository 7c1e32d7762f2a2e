"""The request by which an HTTP connection becomes a WebSocket (RFC 6455, section 4)."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha1

from attrs import frozen

from protocol.dialects.targets import NO_TARGETS, Targets, targets_of
from supervisor.gateway.http.request import HttpRequest

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # proves that the server has read the handshake (section 1.3)
HANDSHAKE = (b"connection", b"upgrade", b"sec-websocket-key", b"sec-websocket-version")


@frozen
class UpgradeHandshake:
    """A valid handshake: the whole response that accepts it, its request target, and the bytes behind it."""

    response: bytes
    target: str
    unread: bytes
    targets: Targets = NO_TARGETS  # of requests that name none


def wants_websocket(request: HttpRequest) -> bool:
    """Whether a request asks for a WebSocket, in a valid handshake or not."""
    return request.header(b"upgrade").lower() == b"websocket" and request.method == "GET"


def is_handshake(request: HttpRequest) -> bool:
    """Whether a request is a valid WebSocket handshake, without headers that could be read in two ways."""
    if request.head is None:
        return False
    names = [name for name, _ in request.head.headers]
    if any(names.count(name) != 1 for name in HANDSHAKE):
        # Of two equal headers wsproto reads the last, and `HttpRequest.header` joins both.
        return False
    tokens = {token.strip().lower() for token in request.header(b"connection").split(b",")}
    return (
        request.head.http_version >= b"1.1"
        and b"upgrade" in tokens
        and bool(request.header(b"sec-websocket-key"))
        and request.header(b"sec-websocket-version") == b"13"
        and request.header(b"content-length") in {b"", b"0"}
        and not request.header(b"transfer-encoding")
    )


def handshake_of(request: HttpRequest, unread: bytes) -> UpgradeHandshake:
    """Return a request that `is_handshake`, and is granted no extension or subprotocol; `unread` came behind it.

    Raises `BadRequest` for a header with targets that is wrong.
    """
    assert request.head is not None
    proof = b64encode(sha1(request.header(b"sec-websocket-key") + GUID, usedforsecurity=False).digest())
    lines = (
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-accept: %b" % proof,
        b"x-request-id: %b" % request.id.encode(),
    )
    response, target = b"\r\n".join(lines) + b"\r\n\r\n", request.head.target.decode("latin-1")
    return UpgradeHandshake(response, target, unread, targets_of(request.head.values))
