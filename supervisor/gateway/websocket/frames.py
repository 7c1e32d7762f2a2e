"""Encoding of WebSocket frames, as a server sends them (RFC 6455, section 5)."""

from __future__ import annotations

import struct

NORMAL, BUG, RESTARTING, TRY_AGAIN = 1000, 1011, 1012, 1013  # close codes


def text_frame(payload: bytes) -> bytes:
    """Return a whole, unmasked WebSocket text frame (RFC 6455, section 5.2)."""
    size = len(payload)
    if size < 126:
        return bytes((0x81, size)) + payload
    if size < 65_536:
        return struct.pack(">BBH", 0x81, 126, size) + payload
    return struct.pack(">BBQ", 0x81, 127, size) + payload


def close_frame(code: int, reason: str) -> bytes:
    """Return a whole WebSocket close frame (RFC 6455, section 5.5.1); `reason` is cut to what one may hold."""
    payload = struct.pack(">H", code) + reason.encode()[:123].decode(errors="ignore").encode()
    return bytes((0x88, len(payload))) + payload
