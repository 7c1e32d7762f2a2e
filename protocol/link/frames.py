"""The closed set of frames between two ends of a link, and their codec.

On the wire a frame is a kind byte, its body's length (four bytes, little-endian), and the body in msgpack. Frames need
no envelope: any number of them, back to back, make one WebSocket message or one write to a socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
from attrs import Factory, frozen

from protocol.errors import PeerViolation
from protocol.link.codec import DECODE_ERRORS
from protocol.messages.generation import FinishReason, Logprob
from protocol.tensors import STAMP_BYTES

VERSION = 5
FRAME_BYTES_MAX = 16 * 1024 * 1024
ATTACHED_BYTES_MAX = 512 * 1024 * 1024
"""The most bytes of incomplete attachments at a receiver, unless its `Hello` has another number."""

STEP_TOKENS_MAX = 256
"""The most tokens of a `Step` between nodes: its reader handles them in one turn of its event loop."""


AGENT_BYTES_MAX = 64 * 1024
"""The most bytes of the description of a transfer agent."""

MEMORY_BYTES_MAX = 2**40


@frozen
class OfferedMemory:
    """The memory in which an end offers tensors to a transfer engine: `size` bytes from `address`.

    `agent` describes the end's transfer agent to those of other nodes. The memory begins with `stamp`.
    """

    agent: bytes
    address: int
    size: int
    stamp: bytes

    def check(self) -> None:
        """Raise `PeerViolation` for a memory that cannot be."""
        if not 0 < len(self.agent) <= AGENT_BYTES_MAX or len(self.stamp) != STAMP_BYTES:
            raise PeerViolation("a transfer agent or a stamp of an impossible size")
        if not (STAMP_BYTES <= self.size <= MEMORY_BYTES_MAX and 0 < self.address < 2**64 - self.size):
            raise PeerViolation(f"{self.size} bytes of offered memory from {self.address:#x}")


@frozen
class Hello:
    """The first frame of either end: its version of the protocol, its name, and the most streams it serves at once.

    An end that `takes_steps` may be sent tokens in a `Step`; nodes of earlier versions take a `Step` from hosts alone.
    The sender holds at most `attached_bytes_max` bytes of incomplete attachments. Once it is sent `ReadsMemory`, it may
    offer tensors in its `memory`.
    """

    version: int
    name: str
    streams_max: int
    takes_steps: bool = False
    attached_bytes_max: int = ATTACHED_BYTES_MAX
    memory: OfferedMemory | None = None


@frozen
class Open:
    """Send a request: `body` is the encoded message; the asker has buffer space for `credit` units of replies.

    `to` names the actor, where one end serves several. The asker waits for `within_ms` from now on: a duration, because
    the clocks of two machines differ. `attached` bytes of the request follow in `RequestData` frames.
    """

    stream: int
    body: bytes
    credit: int
    to: str = ""
    within_ms: int | None = None
    attached: int = 0


@frozen
class Credit:
    """The asker has buffer space for `units` more units of replies."""

    stream: int
    units: int


@frozen
class Cancel:
    """The asker cancels the stream: stop, and send `Fail` or `End` once everything held for it has been released."""

    stream: int
    reason: str


@frozen
class Item:
    """One reply, an encoded message that takes `units` of the stream's credit; `attached` bytes of it follow."""

    stream: int
    body: bytes
    units: int
    attached: int = 0


@frozen
class RequestData:
    """The next bytes of the attachment of a request, from its asker."""

    stream: int
    data: bytes


@frozen
class ReplyData:
    """The next bytes of the attachment of a stream's latest reply, from its answerer."""

    stream: int
    data: bytes


@frozen
class WindowUpdate:
    """The sender has received `size` attached bytes: as many more may be in flight to it."""

    size: int


@frozen
class KeepAlive:
    """The sender is alive, and has had nothing else to send for a while."""


@frozen
class ReadsMemory:
    """The sender can read the offered memory of the other end, as it has tried: requests and results may be in it."""


@frozen
class Taken:
    """The sender has read the tensors of the request on this stream; their memory is free."""

    stream: int


@frozen
class Announce:
    """An encoded message about the sender, sent unasked; all are handled, in the order of sending."""

    body: bytes


@frozen
class Begun:
    """Inside a `Step`: the stream's first token is in this step, computed by weights of this version.

    With `continues`, it is the first token of a new version, and others came before it.
    """

    stream: int
    cached_tokens: int
    version: str = ""
    continues: bool = False


@frozen
class Ended:
    """Inside a `Step`: the answer is whole and its slot is free."""

    stream: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    matched: str | int | None = None


@frozen
class Step:
    """Tokens of many streams at once: parallel arrays, one unit of credit a token.

    The host of an engine sends all of one engine step. A node sends the tokens gathered since its last write, at most
    `STEP_TOKENS_MAX`, and nothing else.

    Stream `streams[i]` gets the next `counts[i]` ids of `tokens`. `begun` comes before the tokens of its stream and
    `ended` after them. `logprobs` has, by stream, one entry for each token, if the stream asked for them.
    """

    streams: list[int]
    counts: list[int]
    tokens: list[int]
    begun: list[Begun]
    ended: list[Ended]
    logprobs: dict[int, tuple[Logprob, ...]] = Factory(dict)

    def pieces(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each stream with its token ids."""
        offset = 0
        for stream, count in zip(self.streams, self.counts, strict=True):
            yield stream, self.tokens[offset : offset + count]
            offset += count


@frozen
class End:
    """The answer is whole; `body` is the encoded result, empty if there is none. The answerer holds nothing more."""

    stream: int
    body: bytes


@frozen
class Fail:
    """The answer failed, with a code of `protocol.errors`; the answerer holds nothing more."""

    stream: int
    code: str
    detail: str
    param: str | None = None


@frozen
class Bye:
    """The sender ends the link, with the reason; the end that is an engine host closes it, else the sender does."""

    code: str
    detail: str


Frame = (
    Hello
    | Open
    | Credit
    | Cancel
    | Item
    | Step
    | End
    | Fail
    | Bye
    | RequestData
    | ReplyData
    | WindowUpdate
    | KeepAlive
    | Announce
    | ReadsMemory
    | Taken
)

KINDS: dict[int, type[Frame]] = {
    1: Hello,
    2: Open,
    3: Credit,
    4: Cancel,
    5: Item,
    6: Step,
    7: End,
    8: Fail,
    9: Bye,
    10: RequestData,
    11: ReplyData,
    12: WindowUpdate,
    13: KeepAlive,
    14: Announce,
    15: ReadsMemory,
    16: Taken,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode
_HEAD = struct.Struct("<BI")


def encode(frame: Frame) -> bytes:
    """Return the frame as it goes on the wire."""
    body = _encode(frame)
    return _HEAD.pack(_KIND_OF[type(frame)], len(body)) + body


class FrameReader:
    """Splits a stream of bytes into frames; raises `PeerViolation` for an invalid frame."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[Frame]:
        """Yield every complete frame."""
        buffer = self._buffer
        buffer += data
        offset, size = 0, len(buffer)
        while size - offset >= _HEAD.size:
            kind, length = _HEAD.unpack_from(buffer, offset)
            if kind not in _DECODERS:
                raise PeerViolation(f"no frame is of kind {kind}")
            if length > self._frame_bytes_max:
                raise PeerViolation(f"a frame of {length} bytes; the limit is {self._frame_bytes_max}")
            body = offset + _HEAD.size
            if size - body < length:
                break
            try:
                frame = _DECODERS[kind].decode(buffer[body : body + length])
            except DECODE_ERRORS as error:
                raise PeerViolation(f"a {KINDS[kind].__name__} that cannot be read: {error}") from error
            offset = body + length
            yield frame
        del buffer[:offset]
