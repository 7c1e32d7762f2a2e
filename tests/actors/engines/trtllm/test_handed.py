"""States of prompts as bytes: they come back whole, and any other bytes are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from attrs import asdict, evolve, fields, frozen
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.trtllm.deltas import Ending
from actors.engines.trtllm.handed import (
    ALONE,
    HAND_OFF,
    HandedFields,
    HandedState,
    TakenStates,
    context_fields,
    generation_fields,
    read_state,
    state_of,
)
from actors.engines.trtllm.signatures import HANDED, VERSIONS, Signatures
from protocol.errors import HandOffFailed
from protocol.messages.adapters import Adapter
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import HAND_OFF_BYTES_MAX, FinishReason, Generate, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.token_ids import TokenIds
from tests.rig.fake_tensorrt_llm.tensorrt_llm.disaggregated_params import DisaggregatedParams, DisaggScheduleStyle
from tests.rig.fake_tensorrt_llm.tensorrt_llm.executor.result import Logprob

OLDEST, *_, NEWEST = VERSIONS
VOCABULARY = 512
DECODE = EngineInfo("trtllm", NEWEST, VOCABULARY, 64, 128, 60, 4, 4, honours_seed=False, hand_off=HandOff.SEQUENTIAL)
PREFILL = evolve(DECODE, hand_off_address=b"life-1")
REQUEST = Generate("r", TokenIds.of([1, 2, 3]), Sampling(4))
PLACE = {7: Logprob(-0.5, 1), 9: Logprob(-2.0, None)}
ITEM = MediaItem(Modality.IMAGE, "0" * 32, (1, 2, 2), 1, MediaForm.PLACES)


def handed(**changes: Any) -> DisaggregatedParams:
    """Return what a prefill of the fake returns."""
    usual: dict[str, Any] = {"request_type": "context_only", "first_gen_tokens": [7], "ctx_request_id": 3}
    return DisaggregatedParams(**usual | {"opaque_state": b"kv"} | changes)


@frozen
class Computed:
    """A prefill's answer of one token."""

    disaggregated_params: object
    logprobs: list[Any] | None = None
    token_ids: tuple[int, ...] = (7,)


def state(request: Generate = REQUEST, info: EngineInfo = PREFILL, **changes: Any) -> bytes:
    return state_of(request, info, Computed(handed(**changes)))


def made(found: HandedState) -> DisaggregatedParams:
    """Return what a decode gives its engine."""
    values = cast("dict[str, Any]", generation_fields(found, Logprob))
    return DisaggregatedParams(**values)


def asked(hand_off: bytes, **changes: Any) -> Generate:
    return evolve(REQUEST, hand_off=hand_off, **changes)


FIELDS: list[dict[str, Any]] = [
    {},
    {"draft_tokens": [4, 5]},
    {"draft_tokens": []},
    {"disagg_request_id": 2**63},
    {"ctx_dp_rank": 0, "ctx_info_endpoint": "tcp://[::1]:5", "schedule_style": DisaggScheduleStyle.GENERATION_FIRST},
    {"first_gen_log_probs": [PLACE]},
    {"first_gen_log_probs": [[PLACE, PLACE]]},
]


@pytest.mark.parametrize("changes", FIELDS)
def test_a_decode_gets_what_the_prefill_returned(changes: dict[str, Any]) -> None:
    found = read_state(asked(state(**changes)), DECODE)
    assert found is not None
    assert made(found) == handed(request_type="generation_only", **changes)
    assert not Signatures.of(NEWEST).unknown(HANDED, generation_fields(found, Logprob))


def test_the_oldest_version_gets_no_field_that_it_does_not_have() -> None:
    found = read_state(asked(state(draft_tokens=[4])), DECODE)
    assert found is not None
    for fields_ in (generation_fields(found, Logprob), context_fields()):
        assert not Signatures.of(OLDEST).unknown(HANDED, fields_)
    assert not Signatures.of(NEWEST).unknown(HANDED, context_fields())


def test_every_field_is_one_that_is_published_and_the_others_are_left_out_for_a_reason() -> None:
    own = {each.name for each in fields(HandedFields)} - {"by_beam"}
    published = {each.name for each in fields(DisaggregatedParams)}
    assert published - own == {
        "request_type",  # a decode's is its own
        "first_gen_logits",  # tensors of the vocabulary's size, which nobody asks for
        "multimodal_embedding_handles",  # already computed with; a decode refuses them
        "multimodal_hashes",
        "mrope_position_ids_handle",  # memory of one host
        "mrope_position_deltas_handle",
    }
    assert own <= published


def test_an_object_of_an_older_version_has_fewer_fields() -> None:
    class Older:
        first_gen_tokens = (7,)
        opaque_state = bytearray(b"kv")
        ctx_request_id = 3

    found = read_state(asked(state_of(REQUEST, PREFILL, Computed(Older()))), DECODE)
    assert found is not None
    assert found.handed == HandedFields((7,), None, 3, b"kv")


def test_a_state_names_its_prefill_and_what_came_from_its_cache() -> None:
    found = read_state(asked(state_of(REQUEST, PREFILL, Computed(handed()), cached_tokens=2)), DECODE)
    assert found is not None
    assert (found.version, found.life, found.cached_tokens, found.ending) == (NEWEST, "life-1", 2, None)


@pytest.mark.parametrize(
    "ending", [Ending(FinishReason.STOP, 7), Ending(FinishReason.STOP), Ending(FinishReason.LENGTH)]
)
def test_an_answer_of_one_token_hands_over_its_end(ending: Ending) -> None:
    wanted = evolve(REQUEST, sampling=Sampling(1))
    for logprobs, places in (
        (None, None),
        ([PLACE], (((7, -0.5, 1), (9, -2.0, None)),)),
        ([-0.5], (((7, -0.5, None),),)),
    ):
        handed_over = state_of(wanted, PREFILL, Computed(None, logprobs), ending=ending)
        found = read_state(asked(handed_over, sampling=Sampling(1)), DECODE)
        assert found is not None
        assert (found.handed.first_gen_tokens, found.ending) == ((7,), ending)
        assert found.handed.first_gen_log_probs == places


def test_the_length_of_one_token_that_every_prefill_has_ends_no_longer_answer() -> None:
    ending = Ending(FinishReason.LENGTH)
    found = read_state(asked(state_of(REQUEST, PREFILL, Computed(handed()), ending=ending)), DECODE)
    assert found is not None
    assert found.ending is None
    with pytest.raises(HandOffFailed, match="no state"):
        state_of(REQUEST, PREFILL, Computed(None), ending=ending)


@pytest.mark.parametrize("changes", [{"opaque_state": None}, {"opaque_state": b""}, {"first_gen_tokens": None}])
def test_a_prefill_that_returns_no_state_fails(changes: dict[str, Any]) -> None:
    with pytest.raises(HandOffFailed, match="no state"):
        state(**changes)


def test_a_state_of_too_many_bytes_is_not_sent() -> None:
    assert len(state(opaque_state=bytes(HAND_OFF_BYTES_MAX - 1024))) <= HAND_OFF_BYTES_MAX
    with pytest.raises(HandOffFailed, match="at most"):
        state(opaque_state=bytes(HAND_OFF_BYTES_MAX))
    with pytest.raises(HandOffFailed, match="at most"):
        read_state(asked(bytes(HAND_OFF_BYTES_MAX + 1)), DECODE)


@pytest.mark.parametrize(
    ("hand_off", "request_changes", "words"),
    [
        (state(info=evolve(PREFILL, version="1.2.1")), {}, "of TensorRT-LLM '1.2.1'"),
        (state(info=evolve(PREFILL, version="v" * 9999)), {}, "of TensorRT-LLM"),
        (state(info=evolve(PREFILL, page_size=8)), {}, "KV caches are different"),
        (state(info=evolve(PREFILL, hand_off_terms=(("transfer", "UCX"),))), {}, "KV caches are different"),
        (state(info=evolve(PREFILL, kind="sglang")), {}, "KV caches are different"),
        (state(), {"tokens": TokenIds.of([1, 2])}, "another prompt"),
        (state(), {"media": (ITEM,)}, "another prompt"),
        (state(), {"adapter": Adapter("pirate", "d")}, "another prompt"),
        (state(first_gen_tokens=[VOCABULARY]), {}, "no first token"),
        (state(first_gen_tokens=[-1]), {}, "no first token"),
        (state(draft_tokens=[VOCABULARY]), {}, "no first token"),
        (state(ctx_request_id=-1), {}, "names no KV cache"),
        (state(ctx_dp_rank=-1), {}, "negative"),
        (state(first_gen_log_probs=[{7: Logprob(float("nan"))}]), {}, "no number"),
    ],
)
def test_a_state_of_another_engine_or_prompt_is_refused(
    hand_off: bytes, request_changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(HandOffFailed, match=words) as refused:
        read_state(asked(hand_off, **request_changes), DECODE)
    assert len(str(refused.value)) < 150


def test_a_state_is_taken_once() -> None:
    taken, one, other = TakenStates(taken_max=2), state(), state(ctx_request_id=4)
    taken.take(one)
    taken.take(other)
    with pytest.raises(HandOffFailed, match="has been used"):
        taken.take(one)
    for number in range(10, 20):
        taken.take(state(ctx_request_id=number))
    taken.take(one)  # only the latest are remembered: TensorRT-LLM itself has no cache for it any more


# Bytes of others -----------------------------------------------------------------------


WHOLE = state(first_gen_log_probs=[PLACE], draft_tokens=[4])


@given(st.binary(max_size=400))
def test_other_bytes_are_no_state(hand_off: bytes) -> None:
    if hand_off != ALONE:
        with pytest.raises(HandOffFailed):
            read_state(asked(hand_off), DECODE)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_state_with_a_changed_byte_is_refused_or_is_still_one(place: int, value: int) -> None:
    changed = WHOLE[:place] + bytes([value]) + WHOLE[place + 1 :]
    with suppress(HandOffFailed):
        found = read_state(asked(changed), DECODE)
        assert found is not None
        made(found)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_state_that_is_cut_off_is_none(length: int) -> None:
    with pytest.raises(HandOffFailed):
        read_state(asked(WHOLE[:length]), DECODE)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"handed": None},
        {"handed": {"first_gen_tokens": ["7"]}},
        {"handed": {"first_gen_tokens": [7], "opaque_state": "kv"}},
        {"handed": {"first_gen_tokens": [True], "opaque_state": b"kv"}},
        {"handed": {"first_gen_tokens": [7], "opaque_state": b"kv", "ctx_info_endpoint": 5}},
        {"reason": "cancelled"},
        {"cached_tokens": -1},
        {"life": b"\xff"},
    ],
)
def test_a_field_of_another_type_is_refused(changes: dict[str, Any]) -> None:
    found = msgspec.msgpack.Decoder(HandedState).decode(WHOLE)
    other = msgspec.msgpack.encode(asdict(found) | changes)
    with pytest.raises(HandOffFailed):
        read_state(asked(other), DECODE)


def test_deeply_nested_bytes_are_refused() -> None:
    with pytest.raises(HandOffFailed):
        read_state(asked(b"\x91" * 100_000), DECODE)


# Without a partner ---------------------------------------------------------------------


def test_a_leg_is_asked_alone() -> None:
    assert HAND_OFF.rendezvous is None
    assert HAND_OFF.without_partner(PREFILL, rank=0, number=1) == b""
    alone = HAND_OFF.without_partner(DECODE, rank=0, number=1)
    assert read_state(asked(alone), DECODE) is None
