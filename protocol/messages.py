"""Every request, reply and result, one frozen type each, and the codec that carries them inside frames.

A request is answered by a stream of replies that ends in one result or in a `RequestError`. The kind byte before the
body picks the decoder, because msgspec refuses a union of attrs classes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from attrs import Factory, frozen

from .errors import PeerViolation

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that lie: the last two for text that is not UTF-8, and for nesting without end."""

REQUEST_ID_LENGTH = 32
"""Every request id has this many hexadecimal digits: SGLang aborts by prefix, so no id may be another's prefix."""


class FinishReason(StrEnum):
    """How an answer that is whole ended; anything else ends in an error."""

    STOP = "stop"  # the model, a stop string or a stop token ended it
    LENGTH = "length"  # it reached the number of tokens asked for


@frozen
class Usage:
    """What a request cost, in tokens; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen
class Sampling:
    """How tokens are chosen and when the engine stops by itself; defaults leave the model's distribution alone."""

    tokens_max: int
    tokens_min: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


# Asked of an engine's worker ----------------------------------------------------------


@frozen
class Generate:
    """Continue `tokens`; answered by one `Started`, then `Tokens`, and `Finished`."""

    id: str
    tokens: list[int]
    sampling: Sampling


@frozen
class Started:
    """The first token is there; `cached_tokens` of the prompt needed no computing."""

    cached_tokens: int = 0


@frozen
class Tokens:
    """The next token ids of one answer: as many as one engine step gave it."""

    ids: list[int]


@frozen
class Finished:
    """The answer is whole; `matched` is the stop string or token id that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    matched: str | int | None = None


@frozen
class GetInfo:
    """Ask an engine what it is; the result is `EngineInfo`."""


class HandOff(StrEnum):
    """How a prefill gives its work to a decode."""

    NONE = "none"
    RENDEZVOUS = "rendezvous"
    SEQUENTIAL = "sequential"


@frozen
class EngineInfo:
    """What an engine is and what it can hold; lengths in tokens."""

    kind: str
    version: str
    vocabulary_size: int
    context_max: int  # prompt and answer together
    kv_tokens_max: int  # what all requests that run at once can hold together
    running_max: int
    page_size: int
    honours_seed: bool
    hand_off: HandOff = HandOff.NONE
    ranks: int = 1


@frozen
class GetLoad:
    """Ask an engine how busy it is by its own count; the result is `EngineLoad`."""


@frozen
class EngineLoad:
    """An engine's own count of its requests and of the KV memory they hold, in tokens."""

    running: int
    waiting: int
    kv_tokens_used: int


@frozen
class FlushCache:
    """Drop the prefix cache of an idle engine; the result is `Done`."""


@frozen
class Done:
    """A control operation was carried out."""


# Asked of a processor ----------------------------------------------------------------


class Role(StrEnum):
    """Who said a turn of a conversation."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"


@frozen
class Turn:
    """One thing said in a conversation."""

    role: Role
    content: str


@frozen
class Respond:
    """Answer a conversation in text; answered by `Accepted`, `Started`, then `Text`, and `Finished`.

    `tokens_max` None asks for as many as the model's limits leave. `params` says how the client spelled a field, so
    that an error names the client's own.
    """

    id: str
    turns: tuple[Turn, ...]
    tokens_max: int | None = None
    tokens_min: int = 0
    temperature: float | None = None  # None: the model's own default
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    params: dict[str, str] = Factory(dict)


@frozen
class Accepted:
    """The request is valid and on its way to an engine."""

    prompt_tokens: int


@frozen
class Text:
    """The next piece of an answer, and how many tokens it stands for."""

    text: str
    tokens: int


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
    | Accepted
    | Text
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
}
_KIND_OF = {cls: bytes((kind,)) for kind, cls in KINDS.items()}
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """Return the message as its kind byte and its msgpack body."""
    return _KIND_OF[type(message)] + _encode(message)


def decode(data: bytes) -> Message:
    """Return the message that `data` holds; raise `PeerViolation` if it holds none."""
    if not data or (decoder := _DECODERS.get(data[0])) is None:
        raise PeerViolation(f"no message is of kind {data[:1].hex() or 'nothing'}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except UNREADABLE as error:
        raise PeerViolation(f"a {KINDS[data[0]].__name__} that cannot be read: {error}") from error
