"""The cost of a request is what it makes engines compute, and what its answers take in memory."""

from __future__ import annotations

import pytest
from attrs import evolve

from protocol.cost import (
    ANSWER_TOKENS_MAX,
    LOGPROB_BYTES,
    SCORES_MAX,
    TOKEN_BYTES,
    check_scores,
    cost,
    generation_tokens,
    generations_of,
    kv_tokens,
    multiplying_field,
)
from protocol.errors import BadRequest
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, Sampling
from protocol.messages.text import Respond, Role, Turn
from protocol.token_ids import TokenIds

ASKED = Respond("0" * 32, turns=(Turn(Role.USER, "hi"),))
SEVERAL = evolve(ASKED, turns=(), texts=("a", "b", "c"))


@pytest.mark.parametrize(
    ("request_", "generations", "param"),
    [
        (ASKED, 1, "prompt"),
        (evolve(ASKED, n=5), 5, "n"),
        (SEVERAL, 3, "prompt"),
        (evolve(SEVERAL, n=2), 6, "n"),
        (evolve(SEVERAL, n=2, best_of=4), 12, "best_of"),
        (evolve(SEVERAL, n=2, best_of=2), 6, "n"),
        (evolve(ASKED, token_lists=((1,), (2,)), turns=()), 2, "prompt"),
    ],
)
def test_a_request_costs_the_generations_that_engines_compute_for_it(
    request_: Respond, generations: int, param: str
) -> None:
    assert (generations_of(request_), multiplying_field(request_)) == (generations, param)


def test_tokens_are_limited_by_the_request_and_by_the_model() -> None:
    assert cost(evolve(ASKED, total_max=100, n=3, tokens_max=10), gathered=False).tokens == 30
    assert cost(evolve(ASKED, total_max=100, n=3), gathered=False).tokens == 300
    assert cost(evolve(ASKED, total_max=100, tokens_max=10**9), gathered=False).tokens == 100
    assert cost(evolve(ASKED, total_max=100, warm_up=True), gathered=False).tokens == 1


def test_the_log_probabilities_of_echoed_prompts_take_memory_in_a_stream_too() -> None:
    asked = evolve(ASKED, turns=(), echo=True, logprobs=1, tokens_max=1, total_max=100, warm_up=True)
    answer = TOKEN_BYTES + 2 * LOGPROB_BYTES
    lists = evolve(asked, token_lists=((1,) * 30, (2,) * 20))
    assert cost(lists, gathered=False).gathered_bytes == 2 * answer + 50 * (TOKEN_BYTES + 2 * LOGPROB_BYTES)
    plain, long, wide = "a" * 40, "a" * 10**6, "日" * 20
    for text, tokens in ((plain, 40 + 16), (wide, 4 * 20 + 16), (long, 100)):
        of_text = cost(evolve(asked, texts=(text,)), gathered=False).gathered_bytes
        unscored = cost(evolve(asked, texts=(text,), logprobs=None), gathered=False).gathered_bytes
        assert of_text == unscored + tokens * 2 * LOGPROB_BYTES + 2 * LOGPROB_BYTES


def test_the_limit_of_a_prompts_log_probabilities_is_exact() -> None:
    check_scores(SCORES_MAX // 4, 3, "logprobs")
    with pytest.raises(BadRequest) as caught:
        check_scores(SCORES_MAX // 4 + 1, 3, "logprobs")
    assert caught.value.param == "logprobs"
    assert str(SCORES_MAX) in str(caught.value)


def test_only_gathered_answers_take_memory() -> None:
    asked = evolve(ASKED, n=2, tokens_max=10, total_max=100)
    assert cost(asked, gathered=False).gathered_bytes == 0
    assert cost(asked, gathered=True).gathered_bytes == 20 * TOKEN_BYTES
    scored = evolve(asked, logprobs=20)
    assert cost(scored, gathered=True).gathered_bytes == 20 * (TOKEN_BYTES + 21 * LOGPROB_BYTES)
    ranked = evolve(asked, best_of=4)
    assert cost(ranked, gathered=False).gathered_bytes == 40 * (TOKEN_BYTES + LOGPROB_BYTES)


def test_the_tokens_of_a_generation_are_those_of_its_prompt_and_answer() -> None:
    assert generation_tokens(Generate("0" * 32, TokenIds.of([1, 2, 3]), Sampling(7))) == 10
    assert generation_tokens(Generate("0" * 32, TokenIds.of([1, 2, 3]), Sampling(-7))) == 3
    assert generation_tokens(Generate("0" * 32, TokenIds.of([1, 2, 3]), Sampling(10**9))) == 3 + ANSWER_TOKENS_MAX


@pytest.mark.parametrize(
    ("leg", "cached", "tokens"),
    [
        (Leg.BOTH, 0, 110),
        (Leg.DECODE, 0, 110),
        (Leg.PREFILL, 0, 100),
        (Leg.BOTH, 90, 20),
        (Leg.PREFILL, 90, 10),
        (Leg.BOTH, 10**9, 10),
        (Leg.BOTH, -(10**9), 110),
    ],
)
def test_what_is_cached_needs_no_memory_nor_does_a_prefill_need_any_for_the_answer(
    leg: Leg, cached: int, tokens: int
) -> None:
    assert kv_tokens(Generate("0" * 32, TokenIds.of([1] * 100), Sampling(10)), leg, cached) == tokens
