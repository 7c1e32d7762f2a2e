"""The request by which an HTTP connection becomes a WebSocket (RFC 6455, section 4)."""

from __future__ import annotations

from supervisor.gateway.http.exchange import Exchange

HANDSHAKE = (b"connection", b"upgrade", b"sec-websocket-key", b"sec-websocket-version")


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


def handshake_bytes(exchange: Exchange) -> bytes:
    """Return a handshake with only what the WebSocket library needs: it fails on odd bytes in other headers."""
    lines = (
        b"GET %b HTTP/1.1" % (b"" if exchange.request is None else exchange.request.target),
        b"host: localhost",  # the client's own has been checked
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: %b" % exchange.header(b"sec-websocket-key"),
    )
    return b"\r\n".join(lines) + b"\r\n\r\n"
