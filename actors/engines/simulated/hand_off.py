"""The hand-off of simulated engines: a rendezvous names the prefill, one of its ranks and a room, and moves nothing."""

from __future__ import annotations

import struct

from attrs import frozen

from actors.kit.hand_off import KindHandOff
from protocol.errors import HandOffFailed
from protocol.messages.engine import EngineInfo

_ROOM_AND_RANK = struct.Struct("!QI")


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
        """Return it as the `hand_off` of a request."""
        return _ROOM_AND_RANK.pack(self.room, self.rank) + self.address

    @classmethod
    def decode(cls, hand_off: bytes) -> Rendezvous:
        """Return a request's rendezvous; raises `HandOffFailed` for other bytes."""
        if len(hand_off) < _ROOM_AND_RANK.size:
            raise HandOffFailed(f"a hand-off of {len(hand_off)} bytes names no room of a prefill")
        room, rank = _ROOM_AND_RANK.unpack_from(hand_off)
        return cls(room, rank, hand_off[_ROOM_AND_RANK.size :])


def rendezvous(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return a rendezvous at a rank of a prefill."""
    return Rendezvous(number, rank, info.hand_off_address or b"").encode()


def without_partner(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return a rendezvous at which neither leg waits for the other."""
    del info
    return Rendezvous(number, rank).encode()


HAND_OFF = KindHandOff(without_partner, rendezvous)
