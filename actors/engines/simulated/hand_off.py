"""The hand-offs of simulated engines, concurrent and sequential; nothing is moved in either.

A rendezvous names the prefill, one of its ranks and a room. A state names the process and the life of its engine, and
has digests of the KV cache's layout and of the prompt. A decode compares the digests with its own.
"""

from __future__ import annotations

import struct

from attrs import frozen

from actors.kit.hand_off import DIGEST_BYTES, KindHandOff, prompt_digest
from protocol.errors import HandOffFailed
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate

ALONE = b"alone"
"""The hand-off of a sequential decode without a partner, which takes no state."""

_ROOM_AND_RANK = struct.Struct("!QI")
_STATE = struct.Struct(f"!QQ{DIGEST_BYTES}s{DIGEST_BYTES}s")


@frozen
class Rendezvous:
    """A room in which a prefill and a decode meet; without an address neither waits for the other."""

    room: int
    rank: int = 0  # the prefill's
    address: bytes = b""

    @property
    def has_partner(self) -> bool:
        """Whether a prefill and a decode meet there."""
        return bool(self.address)

    def encode(self) -> bytes:
        """Return the rendezvous as the `hand_off` of a request."""
        return _ROOM_AND_RANK.pack(self.room, self.rank) + self.address

    @classmethod
    def decode(cls, hand_off: bytes) -> Rendezvous:
        """Return a request's rendezvous; raises `HandOffFailed` for other bytes."""
        if len(hand_off) < _ROOM_AND_RANK.size:
            raise HandOffFailed(f"a hand-off of {len(hand_off)} bytes names no room of a prefill")
        room, rank = _ROOM_AND_RANK.unpack_from(hand_off)
        return cls(room, rank, hand_off[_ROOM_AND_RANK.size :])


@frozen
class State:
    """The state of a prompt that a prefill has computed and holds: of which process, life, KV cache and prompt."""

    life: int
    number: int  # no other state of the process has it
    layout: bytes  # of the KV cache
    prompt: bytes  # its digest
    process: str = ""

    @classmethod
    def of(cls, request: Generate, layout: bytes, *, life: int, number: int, process: str) -> State:
        """Return the state of a request's prompt, its images and videos included."""
        return cls(life, number, layout, prompt_digest(request), process)

    def encode(self) -> bytes:
        """Return the state as the `hand_off` of a `Started`, and of its decode's request."""
        return _STATE.pack(self.life, self.number, self.layout, self.prompt) + self.process.encode()

    @classmethod
    def decode(cls, hand_off: bytes) -> State:
        """Return that of a request; raises `HandOffFailed` for bytes that are none."""
        try:
            life, number, layout, prompt = _STATE.unpack_from(hand_off)
            return cls(life, number, layout, prompt, hand_off[_STATE.size :].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise HandOffFailed(f"a hand-off of {len(hand_off)} bytes is no state of a prefill") from error


def rendezvous(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return a rendezvous at a rank of a prefill."""
    return Rendezvous(number, rank, info.hand_off_address or b"").encode()


def without_partner(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return a rendezvous at which neither leg waits for the other; of a sequential pair, no state."""
    if info.hand_off is HandOff.SEQUENTIAL:
        return ALONE if info.is_decode else b""
    return Rendezvous(number, rank).encode()


HAND_OFF = KindHandOff(without_partner, rendezvous)
