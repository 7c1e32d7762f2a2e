"""Encoding of WebSocket frames, as a server sends them (RFC 6455, section 5)."""

from __future__ import annotations

import struct

_LONGER = struct.Struct(">BBH")
_HEADS_MAX = 1024  # longer payloads are rare: the last events of a response
NORMAL, TOO_BIG, BUG, RESTARTING, TRY_AGAIN = 1000, 1009, 1011, 1012, 1013  # close codes


def _text_head(size: int) -> bytes:
    if size < 126:
        return bytes((0x81, size))
    if size < 65_536:
        return _LONGER.pack(0x81, 126, size)
    return struct.pack(">BBQ", 0x81, 127, size)


_HEADS = tuple(map(_text_head, range(_HEADS_MAX)))


def text_frame(payload: bytes) -> bytes:
    """Return a whole, unmasked WebSocket text frame (RFC 6455, section 5.2)."""
    size = len(payload)
    return (_HEADS[size] if size < _HEADS_MAX else _text_head(size)) + payload


def ping_frame(payload: bytes) -> bytes:
    """Return a whole WebSocket ping frame (RFC 6455, section 5.5.2) with at most 125 bytes."""
    return bytes((0x89, len(payload))) + payload


def close_frame(code: int, reason: str) -> bytes:
    """Return a whole WebSocket close frame (RFC 6455, section 5.5.1); `reason` is cut to what one may hold."""
    payload = struct.pack(">H", code) + reason.encode()[:123].decode(errors="ignore").encode()
    return bytes((0x88, len(payload))) + payload
