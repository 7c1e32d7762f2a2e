"""The hashes by which SGLang names blocks of KV memory in its events, computed from token ids alone.

A block is one page of tokens and all tokens before it. Its hash is the beginning of a SHA-256 over the digest of the
block before it and its own token ids, so equal hashes mean equal prefixes. Requests with a `cache_salt` begin their
chain with a digest of the salt, and so share no hash with others. The scheme is taken from SGLang 0.5.23
(`srt/mem_cache/utils.py`, `srt/mem_cache/events.py`).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from hashlib import sha256

from protocol.token_ids import ID_BYTES, TokenIds

HASH_BYTES = 8
DIGEST_BYTES = 32
_SALT_TAG = b"sglang-cache-salt-v1\0"
_HASH = struct.Struct(">q")


def root_digest(cache_salt: str | None) -> bytes:
    """Return the digest before the first block of a prompt; empty without a salt."""
    return b"" if cache_salt is None else sha256(_SALT_TAG + cache_salt.encode()).digest()


def block_digests(before: bytes, packed: bytes, page_size: int) -> list[bytes]:
    """Return the digest of each full block of packed tokens that follow the block with the digest `before`."""
    size, digests, hashed = page_size * ID_BYTES, [], sha256
    for start in range(0, len(packed) - size + 1, size):
        before = hashed(before + packed[start : start + size]).digest()
        digests.append(before)
    return digests


def block_hash(digest: bytes) -> int:
    """Return the hash of a block, a signed 64-bit integer, by its digest."""
    number: int = _HASH.unpack_from(digest)[0]
    return number


def block_hashes(tokens: Iterable[int], page_size: int, cache_salt: str | None = None) -> tuple[int, ...]:
    """Return the hashes of the full blocks of a prompt; about 0.7 us a block."""
    return tuple(block_hashes_after(root_digest(cache_salt), TokenIds.of(tokens), page_size)[0])


def block_hashes_after(before: bytes, tokens: TokenIds, page_size: int) -> tuple[array[int], bytes]:
    """Return the hashes of the full blocks of tokens after the digest `before`, and the last digest.

    Without a full block the last digest is `before` itself.
    """
    digests = block_digests(before, tokens.packed, page_size)
    # Each hash is the first of the four words of its digest, big-endian there.
    hashes = array("q", memoryview(b"".join(digests)).cast("q")[:: DIGEST_BYTES // HASH_BYTES].tobytes())
    hashes.byteswap()
    return hashes, digests[-1] if digests else before
