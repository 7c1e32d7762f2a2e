"""The bytes of a content: read from a descriptor, or from the text of a data URL; and the refusal of one."""

from __future__ import annotations

import binascii
import os
from hashlib import sha256
from typing import Literal
from urllib.parse import unquote_to_bytes

READ_BYTES = 1024 * 1024
_WHITE_SPACE = b" \t\r\n\x0c"

Code = Literal["invalid", "unsupported", "too_large", "memory", "bug"]


class ContentRefusal(Exception):  # named as what happened
    """A content is refused, with a sentence for the client that sent it."""

    def __init__(self, detail: str, code: Code = "invalid") -> None:
        super().__init__(detail)
        self.detail, self.code = detail, code


def read(descriptor: int) -> bytes:
    """Return everything in a file, from its beginning, without moving its position."""
    pieces: list[bytes] = []
    offset = 0
    while piece := os.pread(descriptor, READ_BYTES, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def decode_data_url(url: bytes, bytes_max: int) -> bytes:
    """Return what a data URL in base64 encodes; what is before its comma was read before. Raises `ContentRefusal`."""
    try:
        content = _from_base64(url.partition(b",")[2])
    except binascii.Error as error:
        raise ContentRefusal("its base64 is not valid") from error
    if len(content) > bytes_max:
        raise ContentRefusal(f"it has {len(content):,} bytes; the limit is {bytes_max:,}", "too_large")
    return content


def digest(content: bytes) -> str:
    """Return the SHA-256 of a content in hexadecimal digits."""
    return sha256(content).hexdigest()


def _from_base64(encoded: bytes) -> bytes:
    if b"%" in encoded:
        encoded = unquote_to_bytes(encoded)
    encoded = encoded.translate(bytes.maketrans(b"-_", b"+/"), _WHITE_SPACE)
    return binascii.a2b_base64(encoded + b"=" * (-len(encoded) % 4), strict_mode=True)
