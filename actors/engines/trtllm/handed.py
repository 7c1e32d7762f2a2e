"""The hand-off of TensorRT-LLM, which is sequential: the state of a prompt, from a prefill to its decode, as bytes.

A prefill computes the prompt and the first token, and returns `DisaggregatedParams`, by which a decode fetches the KV
cache. A state has the fields of these that a decode needs, beside the names of the version and of the prefill's life,
and digests of the KV cache's layout and of the prompt. Logits and handles of memory on one host are left out.

An answer that ends with its first token has no KV cache to hand over. Its state has the end, and the decode answers by
itself. A decode without a partner computes the prompt, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import isnan
from typing import Protocol, TypeAlias, cast

import msgspec
from attrs import asdict, define, evolve, field, fields, frozen

from actors.engines.trtllm.deltas import Ending
from actors.engines.trtllm.log_probabilities import Place
from actors.kit.hand_off import DIGEST_BYTES, KindHandOff, prompt_digest
from protocol.errors import HandOffFailed
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import HAND_OFF_BYTES_MAX, FinishReason, Generate
from protocol.token_ids import IDS_MAX

ALONE = b"alone"
"""The hand-off of a decode without a partner, which takes no state."""

CONTEXT, GENERATION = "context_only", "generation_only"  # the types of a prefill's request and a decode's
FORMAT = 1
TAKEN_MAX = 65_536
"""The most states that a decode remembers as used."""

_Place: TypeAlias = tuple[tuple[int, float, int | None], ...]
"""The likely tokens of a place: ids, log probabilities and ranks."""


class _Logprob(Protocol):
    logprob: float
    rank: int | None


class PrefillAnswer(Protocol):
    """The answer of a prefill (`CompletionOutput`)."""

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The first token."""

    @property
    def logprobs(self) -> Sequence[Place] | None:
        """Its log probabilities."""

    @property
    def disaggregated_params(self) -> object:
        """The object for the decode, None if the answer has ended."""


@frozen
class HandedFields:
    """The fields of `DisaggregatedParams` that a decode is given; None: not set."""

    first_gen_tokens: tuple[int, ...] = ()
    first_gen_log_probs: tuple[_Place, ...] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: tuple[int, ...] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    by_beam: bool = False  # whether the log probabilities are a list for each beam, of which there is one

    @classmethod
    def of(cls, handed: object) -> HandedFields:
        """Return the fields of a prefill's `DisaggregatedParams`; an older version has fewer of them."""
        found = {each.name: getattr(handed, each.name, None) for each in fields(cls)}
        places, by_beam = _places(found["first_gen_log_probs"])
        style = found["schedule_style"]
        return cls(
            first_gen_tokens=tuple(found["first_gen_tokens"] or ()),
            first_gen_log_probs=places,
            ctx_request_id=found["ctx_request_id"],
            opaque_state=None if found["opaque_state"] is None else bytes(found["opaque_state"]),
            draft_tokens=None if found["draft_tokens"] is None else tuple(found["draft_tokens"]),
            disagg_request_id=found["disagg_request_id"],
            ctx_dp_rank=found["ctx_dp_rank"],
            ctx_info_endpoint=found["ctx_info_endpoint"],
            schedule_style=None if style is None else int(style),
            by_beam=by_beam,
        )


@frozen
class HandedState:
    """The state of a computed prompt: its version, life, KV cache and prompt, and the fields for its decode.

    `reason` and `matched` are the end of an answer of one token. Of the prompt, `cached_tokens` came from the
    prefill's cache; a decode counts all tokens as cached.
    """

    version: str
    life: str
    layout: bytes
    prompt: bytes
    handed: HandedFields
    cached_tokens: int = 0
    reason: FinishReason | None = None
    matched: int | None = None
    format: int = FORMAT

    @property
    def ending(self) -> Ending | None:
        """The end of an answer of one token, None for one that a decode continues."""
        return None if self.reason is None else Ending(self.reason, self.matched)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HandedState).decode


def context_fields() -> dict[str, object]:
    """Return the fields of `DisaggregatedParams` for a prefill's request."""
    return {"request_type": CONTEXT}


def generation_fields(state: HandedState, logprob: Callable[[float, int | None], object]) -> dict[str, object]:
    """Return the fields of `DisaggregatedParams` for a decode's request; `logprob` makes TensorRT-LLM's object."""
    handed = state.handed
    found = {name: value for name, value in asdict(handed, recurse=False).items() if value is not None}
    del found["by_beam"]
    for name in ("first_gen_tokens", "draft_tokens"):
        if name in found:
            found[name] = list(found[name])
    if handed.first_gen_log_probs is not None:
        places = [{token: logprob(value, rank) for token, value, rank in each} for each in handed.first_gen_log_probs]
        found["first_gen_log_probs"] = [places] if handed.by_beam else places
    return {"request_type": GENERATION, **found}


def state_of(
    request: Generate, info: EngineInfo, answer: PrefillAnswer, *, ending: Ending | None = None, cached_tokens: int = 0
) -> bytes:
    """Return the state of a prompt that a prefill has computed, as the `hand_off` of its `Started`.

    TensorRT-LLM ends each prefill by its length of one token, which is the end of an answer of one token alone. Raises
    `HandOffFailed` for a state of too many bytes, and without a KV cache unless the answer has ended.
    """
    if ending is not None and ending.reason is FinishReason.LENGTH and request.sampling.tokens_max > 1:
        ending = None
    found = HandedFields.of(answer.disaggregated_params)
    if ending is not None:  # then TensorRT-LLM returns no such object
        ids = tuple(answer.token_ids or ())[:1]
        places = _first_place(ids[0], answer.logprobs) if ids else None
        found = evolve(found, first_gen_tokens=ids, first_gen_log_probs=places, by_beam=False)
    if ending is None and not (found.opaque_state and found.first_gen_tokens):
        raise HandOffFailed("TensorRT-LLM returned no state with the first token")
    matched = None if ending is None or not isinstance(ending.matched, int) else ending.matched
    state = HandedState(
        version=info.version,
        life=(info.hand_off_address or b"").decode(),
        layout=_layout(info),
        prompt=prompt_digest(request),
        handed=found,
        cached_tokens=cached_tokens,
        reason=None if ending is None else ending.reason,
        matched=matched,
    )
    encoded = _encode(state)
    if len(encoded) > HAND_OFF_BYTES_MAX:
        raise HandOffFailed(
            f"the state of a prompt has {len(encoded)} bytes, and at most {HAND_OFF_BYTES_MAX} are sent"
        )
    return encoded


def read_state(request: Generate, info: EngineInfo) -> HandedState | None:
    """Return the state with which a decode is asked, None for one without a partner.

    Raises `HandOffFailed` for any other bytes, and for a state of another version, KV cache or prompt.
    """
    if request.hand_off == ALONE:
        return None
    if len(request.hand_off) > HAND_OFF_BYTES_MAX:
        raise HandOffFailed(f"a hand-off has at most {HAND_OFF_BYTES_MAX} bytes, got {len(request.hand_off)}")
    try:
        state = _decode(request.hand_off)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandOffFailed(f"a hand-off of {len(request.hand_off)} bytes is no state of a prefill") from error
    if state.format != FORMAT:
        raise HandOffFailed(f"the state has the format {state.format}, and this node reads {FORMAT}")
    if state.version != info.version:
        raise HandOffFailed(f"the state is of TensorRT-LLM {state.version[:40]!r}, and this engine of {info.version}")
    if state.layout != _layout(info):
        raise HandOffFailed("the state is of another engine, whose KV caches are different")
    if state.prompt != prompt_digest(request):
        raise HandOffFailed("the state is of another prompt")
    _check_numbers(state, info)
    return state


def _check_numbers(state: HandedState, info: EngineInfo) -> None:
    """Raise `HandOffFailed` for numbers that TensorRT-LLM would crash on."""
    handed = state.handed
    tokens = (*handed.first_gen_tokens, *(handed.draft_tokens or ()))
    ids = [each for each in (handed.ctx_request_id, handed.disagg_request_id) if each is not None]
    vocabulary_size = min(info.vocabulary_size, IDS_MAX)
    if not handed.first_gen_tokens or not all(0 <= token < vocabulary_size for token in tokens):
        raise HandOffFailed("the state has no first token of this model's vocabulary")
    if not (handed.opaque_state or state.ending) or not all(0 <= each < 2**64 for each in ids):
        raise HandOffFailed("the state names no KV cache")
    if not 0 <= state.cached_tokens < IDS_MAX or (handed.ctx_dp_rank is not None and handed.ctx_dp_rank < 0):
        raise HandOffFailed("the state has a negative number")
    if any(isnan(logprob) for place in handed.first_gen_log_probs or () for _, logprob, _ in place):
        raise HandOffFailed("the state has a log probability that is no number")


@define(eq=False)
class TakenStates:
    """The states that a decode has been given; none may be taken twice."""

    taken_max: int = TAKEN_MAX
    _taken: dict[bytes, None] = field(init=False, factory=dict)

    def take(self, hand_off: bytes) -> None:
        """Remember a state; raises `HandOffFailed` for one that has been taken."""
        digest = sha256(hand_off).digest()
        if digest in self._taken:
            raise HandOffFailed("the state has been used by another request")
        if len(self._taken) >= self.taken_max:
            del self._taken[next(iter(self._taken))]
        self._taken[digest] = None


def _places(found: object) -> tuple[tuple[_Place, ...] | None, bool]:
    """Return the log probabilities of the first tokens, and whether they stand in a list for each beam."""
    if not found:
        return None, False
    entries = cast("Sequence[object]", found)
    by_beam = not isinstance(entries[0], Mapping)
    places = cast("Iterable[Mapping[int, _Logprob]]", entries[0] if by_beam else entries)
    return tuple(
        tuple((int(token), float(each.logprob), each.rank) for token, each in place.items()) for place in places
    ), by_beam


def _first_place(token: int, places: Sequence[Place] | None) -> tuple[_Place, ...] | None:
    """Return the log probabilities of the only token of an answer, None without any."""
    if not places:
        return None
    place = places[0]
    if isinstance(place, Mapping):
        return (tuple((int(each), float(likely.logprob), likely.rank) for each, likely in place.items()),)
    return (((token, place, None),),)


def _layout(info: EngineInfo) -> bytes:
    """Return the digest of what both legs of a pair agree on."""
    return sha256(repr(info.terms).encode()).digest()[:DIGEST_BYTES]


def without_partner(info: EngineInfo, *, rank: int, number: int) -> bytes:
    """Return what either leg is asked with alone: the decode computes the prompt, and the prefill holds a state."""
    del rank, number
    return ALONE if info.is_decode else b""


HAND_OFF = KindHandOff(without_partner)
