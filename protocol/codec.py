"""The codec that carries messages inside frames: a kind byte that picks the decoder, and a body in msgpack.

The bytes of tensors are not in the body: they are attached to it, so that they can travel in pieces and nobody copies
them whole.
"""

from __future__ import annotations

import msgspec
from attrs import evolve

from protocol.cluster import Drain, GetStatus, LoadUpdate, NodeState, Reload, Reloaded, Status
from protocol.errors import PeerViolation
from protocol.messages import (
    CheckGrammar,
    Done,
    Embedded,
    EngineInfo,
    EngineLoad,
    Finished,
    FlushCache,
    Generate,
    GetInfo,
    GetLoad,
    GrammarChecked,
    Ping,
    RankStarted,
    RunRank,
    Started,
    Tokens,
)
from protocol.tensors import Tensor, check, size_bytes
from protocol.text_messages import (
    Accepted,
    Answered,
    ChoiceEnded,
    Detokenize,
    Detokenized,
    Respond,
    Text,
    Tokenize,
    Tokenized,
)

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that lie: the last two for text that is not UTF-8, and for nesting without end."""

NOTHING = memoryview(b"")

Message = (
    Generate
    | Started
    | Tokens
    | Finished
    | GetInfo
    | EngineInfo
    | GetLoad
    | EngineLoad
    | FlushCache
    | Done
    | Respond
    | Text
    | Accepted
    | ChoiceEnded
    | Answered
    | Tokenize
    | Tokenized
    | Detokenize
    | Detokenized
    | Embedded
    | NodeState
    | GetStatus
    | Status
    | Drain
    | Reload
    | Reloaded
    | RunRank
    | RankStarted
    | Ping
    | CheckGrammar
    | GrammarChecked
    | LoadUpdate
)

KINDS: dict[int, type[Message]] = {
    1: Generate,
    2: Started,
    3: Tokens,
    4: Finished,
    5: GetInfo,
    6: EngineInfo,
    7: GetLoad,
    8: EngineLoad,
    9: FlushCache,
    10: Done,
    11: Respond,
    12: Text,
    13: Accepted,
    14: ChoiceEnded,
    15: Answered,
    16: Tokenize,
    17: Tokenized,
    18: Detokenize,
    19: Detokenized,
    20: Embedded,
    21: NodeState,
    22: GetStatus,
    23: Status,
    24: Drain,
    25: Reload,
    26: Reloaded,
    27: RunRank,
    28: RankStarted,
    29: Ping,
    30: CheckGrammar,
    31: GrammarChecked,
    40: LoadUpdate,
}
_KIND_OF = {cls: bytes((kind,)) for kind, cls in KINDS.items()}
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """Return the message as its kind byte and its msgpack body, without what `attached` returns."""
    if isinstance(message, Embedded):
        message = Embedded(tuple(evolve(tensor, data=NOTHING) for tensor in message.tensors))
    return _KIND_OF[type(message)] + _encode(message)


def attached(message: Message) -> tuple[memoryview, ...]:
    """Return the bytes that travel beside the body, none of them empty."""
    if not isinstance(message, Embedded):
        return ()
    return tuple(memoryview(check(tensor).data).cast("B") for tensor in message.tensors if len(tensor.data))


def decode(data: bytes, attached: memoryview = NOTHING) -> Message:
    """Return the message that `data` and what is attached to it hold; raise `PeerViolation` if they hold none."""
    if not data or (decoder := _DECODERS.get(data[0])) is None:
        raise PeerViolation(f"no message is of kind {data[:1].hex() or 'nothing'}")
    try:
        message: Message = decoder.decode(memoryview(data)[1:])
    except DECODE_ERRORS as error:
        raise PeerViolation(f"a {KINDS[data[0]].__name__} that cannot be read: {error}") from error
    if isinstance(message, Embedded):
        return Embedded(_filled(message.tensors, attached))
    if attached:
        raise PeerViolation(f"{len(attached)} bytes are attached to a {type(message).__name__}")
    return message


def units_of(reply: Message) -> int:
    """Return how much credit a reply takes: one unit a token, one for any other reply, none for a milestone."""
    match reply:
        case Tokens():
            return len(reply.ids)
        case Text():
            return reply.tokens
        case Started() | Accepted():
            return 0
        case _:
            return 1


def _filled(tensors: tuple[Tensor, ...], data: memoryview) -> tuple[Tensor, ...]:
    """Return the tensors with their bytes, which are as many as their shapes say or a lie."""
    filled, at = [], 0
    for tensor in tensors:
        size = size_bytes(tensor)
        filled.append(evolve(tensor, data=data[at : at + size]))
        at += size
    if at != len(data) or any(len(tensor.data) for tensor in tensors):
        raise PeerViolation(f"tensors of {at} bytes with {len(data)} attached")
    return tuple(filled)
