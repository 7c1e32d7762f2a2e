"""Each field of a request, as TensorRT-LLM gets it or as it is refused, held against the published signatures."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.trtllm.handed import ALONE
from actors.engines.trtllm.sampling import EngineRequest, check, engine_request, priority
from actors.engines.trtllm.signatures import GENERATE, GUIDED, SAMPLING, SCHEDULING, VERSIONS, Signatures
from protocol.errors import BadRequest, Unsupported
from protocol.messages.adapters import Adapter
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, Grammar, GrammarKind, PromptBlocks, RoutingHints, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import NO_TENSOR
from protocol.token_ids import TokenIds
from protocol.trace import Trace

OLDEST, MIDDLE, NEWEST = VERSIONS
END, OTHER_END, VOCABULARY = 2, 3, 10
TRACE = Trace("0" * 31 + "1", "0" * 15 + "2")
ITEM = MediaItem(
    modality=Modality.IMAGE, digest="0" * 32, tokens=4, grid=(1, 4, 4), form=MediaForm.PLACES, data=NO_TENSOR
)
INFO = EngineInfo(
    "trtllm", NEWEST, VOCABULARY, 64, 128, 60, 4, 4, honours_seed=True, grammars=tuple(GrammarKind), data_parallel=4
)
PREFILL = evolve(INFO, hand_off=HandOff.SEQUENTIAL, hand_off_address=b"here")
DECODE = evolve(INFO, hand_off=HandOff.SEQUENTIAL)

USUAL = Generate("r", TokenIds.of([5, 6, 7]), Sampling(8, seed=1))
USUAL_SAMPLING = {
    "max_tokens": 8,
    "end_id": END,
    "pad_id": 0,
    "seed": 1,
    "top_p": 1.0,
    "temperature": 1.0,
    "detokenize": False,
    "include_stop_str_in_output": True,
}
USUAL_CALL = {"inputs": [5, 6, 7], "streaming": True}

Changed: TypeAlias = dict[str, Any]
"""The changed fields of `SamplingParams`, with their values; None: the field is not given any more."""


def asked(*, info: EngineInfo = INFO, ends: tuple[int, ...] = (END,), **changes: Any) -> EngineRequest:
    """Return the arguments of the usual request with changed fields, those of its sampling too."""
    sampling = {name: changes.pop(name) for name in [*changes] if name in SAMPLING_FIELDS}
    wanted = evolve(USUAL, sampling=evolve(USUAL.sampling, **sampling), **changes)
    return engine_request(wanted, info, ends)


def changed(before: Changed, after: Changed) -> Changed:
    return {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}


SAMPLING_FIELDS = {each.name for each in fields(Sampling)}
SAMPLED: tuple[tuple[str, Any, Changed], ...] = (  # a field of `Sampling`, its value, and what it changes
    ("tokens_max", 9, {"max_tokens": 9}),
    ("tokens_min", 3, {"min_tokens": 3}),
    ("temperature", 0.5, {"temperature": 0.5}),
    ("temperature", 0.0, {"top_k": 1}),
    ("top_p", 0.25, {"top_p": 0.25}),
    ("top_k", 7, {"top_k": 7}),
    ("top_k", -1, {}),
    ("min_p", 0.125, {"min_p": 0.125}),
    ("frequency_penalty", 0.5, {"frequency_penalty": 0.5, "prompt_ignore_length": 3}),
    ("presence_penalty", -0.5, {"presence_penalty": -0.5, "prompt_ignore_length": 3}),
    ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
    ("stop_token_ids", (4, 4, 5), {"stop_token_ids": [4, 5]}),
    ("ignore_eos", True, {"end_id": -1}),
    ("seed", 12, {"seed": 12}),
    ("seed", -1, {"seed": 2**64 - 1}),
    ("seed", None, {"seed": 0x6C09FF9D}),
    ("logit_bias", {1: 5.0, 9: -100.0}, {"embedding_bias": [0, 5.0, 0, 0, 0, 0, 0, 0, 0, -100.0]}),
    ("grammar", Grammar(GrammarKind.REGEX, "a+"), {}),  # see `test_a_grammar_is_an_object_of_its_own`
)


@pytest.mark.parametrize(("name", "value", "expected"), SAMPLED)
def test_a_field_of_the_sampling_changes_its_own_arguments_alone(name: str, value: Any, expected: Changed) -> None:
    found = asked(**{name: value})
    assert changed(USUAL_SAMPLING, found.sampling) == expected
    assert found.call == USUAL_CALL


REQUESTED: tuple[
    tuple[str, Any, Changed, Changed], ...
] = (  # a field of `Generate`; `SamplingParams`, `generate_async`
    ("tokens", TokenIds.of([1]), {}, {"inputs": [1]}),
    ("logprobs", 3, {"logprobs": 3}, {}),
    ("logprobs", 0, {"logprobs": 1}, {}),
    ("cache_salt", "s", {}, {"cache_salt": "s"}),
    ("priority", 1, {}, {"priority": 0.75}),
    ("trace", TRACE, {}, {"trace_headers": {"traceparent": f"00-{TRACE.id}-{TRACE.span}-01"}}),
    ("adapter", Adapter("pirate", "d"), {}, {"cache_salt": "adapter:pirate@d"}),  # and see `test_an_adapter_...`
    ("prompt_logprobs", True, {"prompt_logprobs": 1}, {"cache_salt": "scores:r"}),
    ("resumed_tokens", 2, {}, {}),  # counts for penalties; see `test_resumed_tokens_...`
    ("rank", 2, {}, {}),  # see `test_a_rank_is_an_object_of_its_own`
    *(  # nothing of them is for the engine itself
        (name, value, {}, {})
        for name, value in {
            "owner": "someone",
            "cached_tokens": 2,
            "hints": RoutingHints(session="s", blocks=(PromptBlocks(4, (1,)),)),
            "hand_off": b"state",  # see `handed.py`
        }.items()
    ),
)
ELSEWHERE = {
    "id",  # TensorRT-LLM counts its requests itself; it is the seed of those without one
    "sampling",
    "media",  # see `test_images_are_refused_by_a_decode_alone`
}


@pytest.mark.parametrize(("name", "value", "sampling", "call"), REQUESTED)
def test_a_field_of_the_request_changes_its_own_arguments_alone(
    name: str, value: Any, sampling: Changed, call: Changed
) -> None:
    found = asked(**{name: value})
    assert (changed(USUAL_SAMPLING, found.sampling), changed(USUAL_CALL, found.call)) == (sampling, call)


def test_no_field_is_forgotten() -> None:
    assert {name for name, *_ in SAMPLED} == SAMPLING_FIELDS
    assert {name for name, *_ in REQUESTED} | ELSEWHERE == {each.name for each in fields(Generate)}


@pytest.mark.parametrize(
    ("kind", "name"), [("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar"), ("structural_tag", None)]
)
def test_a_grammar_is_an_object_of_its_own(kind: str, name: str | None) -> None:
    found = asked(grammar=Grammar(GrammarKind(kind), "text"))
    assert found.guided == {name or kind: "text"}
    assert asked().guided is None


def test_the_end_of_a_grammar_ends_an_answer_whose_end_is_ignored() -> None:
    assert asked(grammar=Grammar(GrammarKind.REGEX, "a"), ignore_eos=True).sampling["end_id"] == END


def test_a_rank_is_an_object_of_its_own() -> None:
    assert asked(rank=2).scheduling == {"attention_dp_rank": 2, "attention_dp_relax": False}
    assert asked(info=evolve(INFO, data_parallel=1)).scheduling is None


# Traps --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [-1, 1, 40])
def test_no_default_of_the_engine_decides_what_is_drawn(temperature: float, top_k: int) -> None:
    """Greedy by any of its versions' rules if and only if the temperature is 0 or one token is left."""
    found = asked(temperature=temperature, top_k=top_k).sampling
    assert found["temperature"], "0 is no number to version 1.0"
    assert found["top_p"] == 1.0
    assert (found.get("top_k") == 1) is (temperature == 0 or top_k == 1)
    assert found.get("top_k", 1) != 0


def test_an_ignored_end_keeps_the_stop_tokens_and_bans_no_token() -> None:
    found = asked(ignore_eos=True, stop_token_ids=(4,)).sampling
    assert (found["end_id"], found["stop_token_ids"], "ignore_eos" in found) == (-1, [4], False)
    assert "min_tokens" not in asked(ignore_eos=True, tokens_min=3).sampling, "the end that it would hold back is none"


def test_further_ends_of_a_model_are_stop_tokens() -> None:
    assert asked(ends=(END, OTHER_END)).sampling["stop_token_ids"] == [OTHER_END]
    assert "stop_token_ids" not in asked(ends=(END, OTHER_END), ignore_eos=True).sampling
    assert asked(ends=()).sampling["end_id"] == -1


@pytest.mark.parametrize(("ends", "stops"), [((END, OTHER_END), ()), ((END,), (4,)), ((), (4,))])
def test_a_least_length_is_refused_where_stop_tokens_would_end_the_answer_before(
    ends: tuple[int, ...], stops: tuple[int, ...]
) -> None:
    with pytest.raises(Unsupported) as refused:
        asked(ends=ends, stop_token_ids=stops, tokens_min=2)
    assert refused.value.param == "min_tokens"


def test_resumed_tokens_count_for_penalties_and_the_prompt_does_not() -> None:
    assert asked(frequency_penalty=0.5, resumed_tokens=2).sampling["prompt_ignore_length"] == 1


def test_requests_without_a_seed_have_different_ones() -> None:
    assert len({asked(id=name, seed=None).sampling["seed"] for name in ("a", "b", "c")}) == 3


def test_the_scores_of_a_prompt_find_nothing_in_the_cache() -> None:
    asks = [asked(id=name, prompt_logprobs=True, logprobs=5, cache_salt="s") for name in ("a", "b")]
    assert {each.call["cache_salt"] for each in asks} == {"scores:a", "scores:b"}
    assert asks[0].sampling["prompt_logprobs"] == 5


def test_a_prefill_draws_one_token_as_the_decode_would() -> None:
    found = asked(info=PREFILL, tokens_min=5, stop_token_ids=())
    assert (found.sampling["max_tokens"], found.sampling["min_tokens"], found.call["streaming"]) == (1, 1, False)
    assert asked(info=PREFILL, ignore_eos=True).sampling["end_id"] == -1
    assert asked(info=DECODE).sampling == asked().sampling


def test_images_are_refused_by_a_decode_alone() -> None:
    with pytest.raises(Unsupported) as refused:
        asked(info=DECODE, media=(ITEM,), hand_off=ALONE)
    assert refused.value.param == "media"
    for info in (INFO, PREFILL, DECODE):
        assert asked(info=info, media=(ITEM,)).call["inputs"] == [5, 6, 7], "the host adds them"


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.5])
def test_a_share_that_the_engine_refuses_is_refused_by_name(top_p: float) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(top_p=top_p)
    assert refused.value.param == "top_p"


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadRequest, match="outside 0 to 9"):
        asked(tokens=TokenIds.of([1, VOCABULARY]))


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=8))
def test_priorities_keep_their_order(numbers: list[int]) -> None:
    assert sorted(numbers, key=priority) == sorted(numbers)
    assert priority(0) == 0.5


@given(st.integers())
def test_a_priority_is_from_0_to_1(number: int) -> None:
    assert 0 <= priority(number) <= 1


# Versions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "changes", "param"),
    [
        (OLDEST, {"cache_salt": "s"}, "cache_salt"),
        (OLDEST, {"adapter": Adapter("pirate", "d")}, "model"),
        (OLDEST, {"rank": 1}, "rank"),
        (MIDDLE, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (MIDDLE, {"presence_penalty": 0.5}, "presence_penalty"),
        (MIDDLE, {"prompt_logprobs": True, "logprobs": 0}, "echo"),
    ],
)
def test_what_a_version_cannot_honour_is_refused_by_name(version: str, changes: Changed, param: str) -> None:
    with pytest.raises(Unsupported) as refused:
        asked(info=evolve(INFO, version=version, data_parallel=1 + changes.get("rank", 0)), **changes)
    assert refused.value.param == param
    asked(**changes)


def test_what_changes_no_answer_is_left_out_where_a_version_has_no_place_for_it() -> None:
    found = asked(info=evolve(INFO, version=MIDDLE), priority=3, trace=TRACE)
    assert found.call == USUAL_CALL


@st.composite
def requests(draw: st.DrawFn) -> Generate:
    """Return any request, of its fields with rows above."""
    sampling = {name: value for name, value, _ in draw(st.lists(st.sampled_from(SAMPLED)))}
    rest = {name: value for name, value, *_ in draw(st.lists(st.sampled_from(REQUESTED)))}
    return evolve(USUAL, sampling=evolve(USUAL.sampling, **sampling), **rest)


@given(
    requests(),
    st.sampled_from(VERSIONS),
    st.sampled_from([INFO, PREFILL, DECODE]),
    st.sampled_from([(), (END,), (END, OTHER_END)]),
)
def test_no_version_is_given_an_argument_that_it_does_not_have(
    wanted: Generate, version: str, info: EngineInfo, ends: tuple[int, ...]
) -> None:
    signatures = Signatures.of(version)
    try:
        found = engine_request(wanted, evolve(info, version=version), ends)
    except BadRequest as error:
        refused: str | None = error.param or "tokens"
    else:
        check(wanted, evolve(info, version=version))
        refused = None
        assert not signatures.unknown(SAMPLING, found.sampling)
        assert not signatures.unknown(GENERATE, found.call)
        assert not signatures.unknown(GUIDED, found.guided or {})
        assert found.scheduling is None or not signatures.unknown(SCHEDULING, found.scheduling)
    assert refused in {None, "model", "echo", "min_tokens", *SAMPLING_FIELDS, *(each.name for each in fields(Generate))}
