"""Malformed WebSocket frames and messages."""

from __future__ import annotations

from random import Random

from tests.system.fuzz.bodies import event, mutated
from tests.system.fuzz.http import pieces
from tests.system.fuzz.values import corrupted

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ODD_LINES = (
    b"sec-websocket-version: 8\r\n", b"sec-websocket-key: x\r\n", b"sec-websocket-key: \xff\r\n", b"connection: close\r\n",
    b"sec-websocket-protocol: a, b, \x22\r\n", b"sec-websocket-extensions: permessage-deflate\r\n", b"host: x\r\n",
    b"sec-websocket-extensions: permessage-deflate; client_max_window_bits=99999\r\n", b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n", b"origin: http://evil.example\r\n", b"expect: 100-continue\r\n",
    b"sec-websocket-extensions: ;;,,=\r\n", b"upgrade: h2c\r\n", b"sec-websocket-protocol: \r\n", b"x: \0\r\n",
    b"sec-websocket-protocol: a\r\nsec-websocket-protocol: a\r\n", b"x-request-id: \r\n", b"sec-websocket-key:\r\n",
)  # fmt: skip
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def frame(
    payload: bytes, opcode: int = TEXT, *, fin: bool = True, reserved: int = 0, mask: bytes = b"\x37\xfa\x21\x3d"
) -> bytes:
    """Return a client's frame, in whichever way it is right."""
    size = len(payload)
    length = (
        bytes([size]) if size < 126 else (b"\x7e" + size.to_bytes(2) if size < 65_536 else b"\x7f" + size.to_bytes(8))
    )
    length = bytes([length[0] | 0x80]) + length[1:]
    return bytes([fin << 7 | reserved << 4 | opcode]) + length + mask + masked(payload, mask)


def masked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    long = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(long)).to_bytes(size)


def event_text(rng: Random) -> bytes:
    """Return the text of an event, right or wrong."""
    return mutated(rng, event(rng))


def odd(rng: Random) -> bytes:  # noqa: C901, PLR0911, PLR0912  # one case an oddity
    """Return a few bytes on an open WebSocket, most of them against its rules."""
    text = event_text(rng)
    match rng.randrange(17):
        case 0:
            return bytes([0x81, min(len(text), 125)]) + text[:125]  # no mask
        case 1:
            return frame(text, rng.choice((3, 4, 5, 6, 7, 11, 12, 13, 14, 15)))
        case 2:
            return frame(text, reserved=rng.randrange(1, 8))
        case 3:
            size = rng.choice((2**63 - 1, 2**63, 2**64 - 1, 2**32, 4 * 1024 * 1024 + 1, 0, 5, 65_535))
            return b"\x81\xff" + size.to_bytes(8) + b"\0\0\0\0" + text
        case 4:
            return (
                b"\x81\xfe" + rng.choice((0, 5, 125)).to_bytes(2) + b"\0\0\0\0" + text[:125]
            )  # longer than it need be
        case 5:
            return frame(text[:125], rng.choice((CLOSE, PING, PONG)), fin=False)
        case 6:
            return frame(b"a" * rng.choice((126, 200, 70_000)), rng.choice((CLOSE, PING, PONG)))
        case 7:
            return frame(text, 0)  # continues nothing
        case 8:
            return frame(text[:5], fin=False) + frame(text[5:])  # a second start
        case 9:
            bad = rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"a\x80"))
            return frame(bad) if rng.random() < 0.5 else frame(text[:3] + bad, fin=False) + frame(text[3:], 0)
        case 10:
            code = rng.choice((0, 999, 1000, 1001, 1004, 1005, 1006, 1015, 1016, 2999, 3000, 4999, 5000, 65_535))
            return frame(code.to_bytes(2) + rng.choice((b"", b"bye", b"\xff\xfe", b"x" * 123)), CLOSE)
        case 11:
            return frame(rng.choice((b"", b"\x03", b"\x03\xe8")), CLOSE) + frame(text) + frame(b"x", PING)
        case 12:
            return frame(b"ping", PING) * rng.choice((1, 10, 2_000))
        case 13:
            whole = [frame(text[:4], fin=False), frame(b"in between", PING), frame(text[4:], 0)]
            return b"".join(whole)
        case 14:
            return frame(b"", fin=False) + frame(b"", 0, fin=False) * rng.choice((1, 500)) + frame(text, 0)
        case 15:
            return frame(text, BINARY)
        case _:
            return corrupted(rng, frame(text) + frame(event_text(rng)))


def raw(rng: Random) -> list[bytes]:
    """Return what is said on one connection from its handshake on, in the pieces in which it is sent."""
    handshake = HANDSHAKE
    kind = rng.random()
    if kind < 0.15:
        lines = handshake[:-2] + b"".join(rng.sample(ODD_LINES, rng.choice((1, 1, 2)))) + b"\r\n"
        handshake = lines if kind < 0.1 else corrupted(rng, handshake)
    elif kind < 0.2:
        gone = rng.choice((b"host: 127.0.0.1\r\n", b"connection: Upgrade\r\n", b"sec-websocket-version: 13\r\n"))
        handshake = handshake.replace(gone, b"")
    after = b"".join(
        odd(rng) if rng.random() < 0.7 else frame(event_text(rng)) for _ in range(rng.choice((1, 1, 2, 4)))
    )
    if rng.random() < 0.3:
        return pieces(rng, handshake + after)  # in haste
    return [handshake, *pieces(rng, after)]
