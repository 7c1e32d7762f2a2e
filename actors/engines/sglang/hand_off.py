"""SGLang's hand-offs: a prefill and a decode meet in a room of the prefill's bootstrap server.

A room is a number. Modulo the prefill's number of ranks it is the prefill's rank, so a decode finds the rank by it.
SGLang moves the KV cache itself, while both legs run.

In a concurrent hand-off the router draws the room. In a sequential one the prefill does: the state of a prompt is the
rendezvous at which the prefill waits with the KV cache, with a digest of the prompt. Each life of a prefill has another
port, so that no decode meets a later life with a state.
"""

from __future__ import annotations

import struct

from attrs import evolve, frozen

from actors.kit.hand_off import DIGEST_BYTES, KindHandOff, prompt_digest
from protocol.errors import HandOffFailed
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate

ROOM_MAX = 2**63 - 1  # SGLang's scheduler computes with 64 bits, one of them a sign
HOST_LENGTH_MAX = 253  # the longest name in the DNS

NO_PARTNER = "2.2.2.2"
"""The host of a rendezvous without a partner, by which SGLang chooses a transfer that moves nothing."""

_END_OF_HOST = b"\0"  # before the digest of a state
_ROOM, _PORT = struct.Struct("!Q"), struct.Struct("!H")


@frozen
class Rendezvous:
    """A room of the bootstrap server of a prefill; `room` is of one request alone."""

    room: int
    host: str
    port: int
    prompt: bytes = b""  # the digest of a state's prompt

    @property
    def has_partner(self) -> bool:
        """Whether a prefill and a decode meet there."""
        return self.host != NO_PARTNER

    @property
    def url_host(self) -> str:
        """The host as a URL has it: an IPv6 address in brackets, since SGLang puts a colon and the port behind it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def encode(self) -> bytes:
        """Return the rendezvous as the `hand_off` of a request."""
        digest = _END_OF_HOST + self.prompt if self.prompt else b""
        return _ROOM.pack(self.room) + address(self.host, self.port) + digest

    @classmethod
    def decode(cls, hand_off: bytes) -> Rendezvous:
        """Return a request's rendezvous; raises `HandOffFailed` for other bytes."""
        if len(hand_off) < _ROOM.size:
            raise HandOffFailed(f"a hand-off of {len(hand_off)} bytes names no room of a prefill")
        (room,) = _ROOM.unpack_from(hand_off)
        if room > ROOM_MAX:
            raise HandOffFailed(f"the room of a hand-off must be from 0 to {ROOM_MAX}, got {room}")
        port_at, host_at = _ROOM.size, _ROOM.size + _PORT.size
        host, end, prompt = hand_off[host_at:].partition(_END_OF_HOST)
        if end and len(prompt) != DIGEST_BYTES:
            raise HandOffFailed(f"the digest of a state's prompt has {DIGEST_BYTES} bytes, got {len(prompt)}")
        return cls(room, *_host_and_port(hand_off[port_at:host_at] + host), prompt)


def address(host: str, port: int) -> bytes:
    """Return the address of a prefill: the port and the host of its bootstrap server."""
    return _PORT.pack(port) + host.encode()


def _host_and_port(address: bytes) -> tuple[str, int]:
    """Return the host and the port of an address; raises `HandOffFailed` for invalid bytes."""
    try:
        (port,), host = _PORT.unpack_from(address), address[_PORT.size :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise HandOffFailed("the address of a prefill cannot be read") from error
    if not port or not 0 < len(host) <= HOST_LENGTH_MAX or not host.isprintable():
        raise HandOffFailed(f"a prefill has no bootstrap server at port {port} of {host[:HOST_LENGTH_MAX]!r}")
    return host, port


def _room(info: EngineInfo, rank: int, number: int) -> int:
    """Return a room of one rank; numbers drawn one after the other give different rooms."""
    return number % ((ROOM_MAX + 1) // info.data_parallel) * info.data_parallel + rank


def rendezvous(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return a rendezvous at a rank of a prefill; raises `HandOffFailed` for an invalid address."""
    host, port = _host_and_port(info.hand_off_address or b"")
    if host == NO_PARTNER:
        raise HandOffFailed(f"a prefill has the address {NO_PARTNER}, where SGLang moves nothing")
    return Rendezvous(_room(info, rank, number), host, port).encode()


def without_partner(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return a rendezvous at which neither leg waits for the other; nothing for a prefill that returns states."""
    if info.returns_states:
        return b""
    return Rendezvous(_room(info, rank, number), NO_PARTNER, 1).encode()


def state(info: EngineInfo, request: Generate, *, number: int) -> bytes:
    """Return the state of a request's prompt at a prefill; no other request has the `number`."""
    meeting = Rendezvous.decode(rendezvous(info, rank=request.rank, number=number))
    return evolve(meeting, prompt=prompt_digest(request)).encode()


def check_hand_off(request: Generate, info: EngineInfo) -> None:
    """Raise `HandOffFailed` for a hand-off that an engine would wait for in vain.

    A rendezvous may be at another prefill, such as one for a decode that has become a prefill. A state may be of
    another prompt.
    """
    if info.returns_states:
        return
    own = info.hand_off_address
    if own is not None and request.hand_off[_ROOM.size :] not in {own, address(NO_PARTNER, 1)}:
        raise HandOffFailed("the rendezvous is at another prefill, or at this one before it was started again")
    if info.hand_off is HandOff.SEQUENTIAL:
        found = Rendezvous.decode(request.hand_off)
        if found.has_partner and found.prompt != prompt_digest(request):
            raise HandOffFailed("the hand-off is no state of this prompt")


HAND_OFF = KindHandOff(without_partner, rendezvous)
