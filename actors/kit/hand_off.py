"""The hand-off of a kind of engines: the bytes with which a prefill and a decode are asked, as routers make them.

No router reads these bytes: a kind makes them, and its engines read them. An engine reports the way of its hand-off
(`HandOff`) and, if it is a prefill, an address, which is opaque as well.

In a *concurrent* hand-off both legs are asked at once with a rendezvous, which is made from the prefill's address. In a
*sequential* one the prefill is asked first, without a hand-off. Its `Started` has a state, with which the decode is
asked. The prefill's call is the lease of the state: it stays open until the decode has begun, and leaving it frees the
state at any moment.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Protocol

from attrs import frozen

from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate

DIGEST_BYTES = 16


def prompt_digest(request: Generate) -> bytes:
    """Return the digest of a prompt, with its images and videos and with the adapter that computes it."""
    digest = sha256(request.tokens.packed)
    for item in request.media:
        digest.update(item.digest.encode())
    if request.adapter is not None:
        digest.update(f"{request.adapter.name}@{request.adapter.digest}".encode())
    return digest.digest()[:DIGEST_BYTES]


class MakeHandOff(Protocol):
    """Make the `hand_off` of a request to an engine."""

    def __call__(self, info: EngineInfo, *, rank: int, number: int) -> bytes:
        """Return the bytes for one rank of the engine with that info; no other request has the `number` of 63 bits.

        Raises `HandOffFailed` if the engine's address cannot be read.
        """


@frozen
class KindHandOff:
    """The hand-off of one kind.

    `without_partner` is for a leg that is asked alone, such as by a canary: it does its part, and no KV cache is moved.
    `rendezvous` is for both legs of a concurrent pair, from the prefill's info; None for a kind that has no such pairs.
    """

    without_partner: MakeHandOff
    rendezvous: MakeHandOff | None = None
