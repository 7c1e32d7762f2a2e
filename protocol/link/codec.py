"""Encoding of messages inside frames: a kind byte that selects the decoder, and a body in msgpack.

The rows of the files of `protocol/messages/` are the only source of kinds: a message without a row has no encoding. The
bytes of tensors are attached to the body, so they are sent in pieces and never copied whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from attrs import evolve

from protocol.errors import PeerViolation
from protocol.messages import cluster, embedding, engine, generation, kv_events, media, operations, text
from protocol.messages.generation import Started, Tokens
from protocol.messages.kind import Kind, Message, by_message
from protocol.messages.text import Accepted, CallPart, Reasoning, Text
from protocol.tensors import Tensor, check_tensor, has_place, size_bytes

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for invalid bytes; the last two are for text that is not UTF-8 and for deep nesting."""

NOTHING = memoryview(b"")

ROWS = by_message(
    row for file in (generation, engine, operations, text, cluster, media, kv_events, embedding) for row in file.KINDS
)
"""Every message between nodes, with the messages that may answer it."""

KINDS: dict[int, type[Message]] = {row.number: message for message, row in ROWS.items()}
WITH_TENSORS = frozenset(message for message in ROWS if message.tensors is not Message.tensors)
"""The messages with tensors; all others take no attachment."""

_KIND_OF = {message: bytes((number,)) for number, message in KINDS.items()}
_DECODERS = {number: msgspec.msgpack.Decoder(message) for number, message in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """Return the message as its kind byte and its msgpack body, without its attachment.

    A tensor with bytes is attached; one without may be in a shared region. Raises `TypeError` for a message without a
    row.
    """
    if type(message) in WITH_TENSORS and message.tensors:
        message = message.with_tensors([_description(tensor) for tensor in message.tensors])
    try:
        kind = _KIND_OF[type(message)]
    except KeyError:
        raise TypeError(f"a {type(message).__name__} has no row in `KINDS`, so it crosses no link") from None
    return kind + _encode(message)


def attached(message: Message) -> tuple[memoryview, ...]:
    """Return the attachment of a message as non-empty buffers."""
    if type(message) not in WITH_TENSORS:
        return ()
    return tuple(memoryview(check_tensor(tensor).data).cast("B") for tensor in message.tensors if len(tensor.data))


def decode(data: bytes, attached: memoryview = NOTHING, *, shared: bool = False, remote: bool = False) -> Message:
    """Return the message encoded in `data` and its attachment; raises `PeerViolation` if they encode none.

    If regions may be `shared`, tensors in them have no bytes yet; else a region is a violation. So for `remote` ranges.
    """
    message = _described(data)
    if type(message) in WITH_TENSORS and (tensors := message.tensors):
        return message.with_tensors(_filled(tensors, attached, shared=shared, remote=remote))
    if attached:
        raise PeerViolation(f"{len(attached)} bytes are attached to a {type(message).__name__}")
    return message


def check_attached(data: bytes, size: int) -> None:
    """Raise `PeerViolation` unless the tensors of an encoded message take an attachment of `size` bytes.

    It runs before the first byte of an attachment is kept.
    """
    message = _described(data)
    message.check_tensors()
    if sum(size_bytes(tensor) for tensor in message.tensors if not has_place(tensor)) != size:
        raise PeerViolation(f"{size} bytes are attached to a {type(message).__name__} whose tensors take others")


def request_row(request: Message) -> Kind:
    """Return the row of a request, with its replies; raises `TypeError` for any other message."""
    row = ROWS.get(type(request))
    if row is None or row.result is None:
        raise TypeError(f"a {type(request).__name__} has no row with a result, so nobody is asked it over a link")
    return row


def units_of(reply: Message) -> int:
    """Return the units of credit of a reply: one for each token, none for a milestone, one for any other reply."""
    match reply:
        case Tokens():
            return len(reply.ids)
        case Text() | Reasoning() | CallPart():
            return reply.tokens
        case Started() | Accepted():
            return 0
        case _:
            return 1


def _described(data: bytes) -> Message:
    """Return an encoded message, its tensors without bytes; raises `PeerViolation` if there is none."""
    if not data or (decoder := _DECODERS.get(data[0])) is None:
        raise PeerViolation(f"no message is of kind {data[:1].hex() or 'nothing'}")
    try:
        message: Message = decoder.decode(memoryview(data)[1:])
    except DECODE_ERRORS as error:
        raise PeerViolation(f"a {KINDS[data[0]].__name__} that cannot be read: {error}") from error
    return message


def _description(tensor: Tensor) -> Tensor:
    if len(tensor.data):
        return evolve(tensor, data=NOTHING, shared=None, remote=None)
    return tensor


def _filled(tensors: Iterable[Tensor], data: memoryview, *, shared: bool, remote: bool) -> tuple[Tensor, ...]:
    """Return the tensors with their bytes; raises `PeerViolation` unless their shapes take all of `data`."""
    filled, offset = [], 0
    for tensor in tensors:
        size = size_bytes(tensor)
        if has_place(tensor):
            if tensor.shared is not None and (not shared or tensor.shared.size != size):
                raise PeerViolation(f"a tensor of {size} bytes in shared memory, where there is none of it")
            if tensor.remote is not None and (not remote or tensor.remote.size != size):
                raise PeerViolation(f"a tensor of {size} bytes in offered memory, where there is none of it")
            filled.append(tensor)
            continue
        filled.append(evolve(tensor, data=data[offset : offset + size]))
        offset += size
    if offset != len(data) or any(len(tensor.data) for tensor in tensors):
        raise PeerViolation(f"tensors of {offset} bytes with {len(data)} attached")
    return tuple(filled)
