"""A simulated answer that is cut anywhere and resumed elsewhere equals the uncut one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.messages.generation import Finished, FinishReason, Generate, Logprob
from protocol.token_ids import TokenIds
from tests.rig.simulated_engines import batch, generate, read, running

EOS = 99
LINES = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14, 15]]
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "at least some": {"tokens_min": 9},
    "at least some of a seeded one": {"tokens_min": 14, "temperature": 1.0, "seed": 3},
    "eos ignored": {"ignore_eos": True},
    "stop tokens": {"stop_token_ids": (5, 13), "tokens_min": 4},
    "some forbidden": {"logit_bias": {2: -100.0, 6: -100.0}},
    "eos forbidden": {"logit_bias": {EOS: -100.0}},
    "one forced": {"logit_bias": {42: 100.0}},
    "eos forced": {"logit_bias": {EOS: 100.0}, "tokens_min": 6},
}


def whole(request: Generate, lines: Sequence[list[int]]) -> tuple[list[int], list[Logprob | None], Finished]:
    """Return the ids, log probabilities and end of an answer."""
    engine = batch(lines, eos_id=EOS, length_min=3, length_max=24)
    engine.submit(request, 0.0)
    ids, scores, now = [], [], 0.0
    while True:
        update = engine.advance(now)
        ids += update.tokens
        scores += update.logprobs
        if update.ended:
            return ids, scores, update.ended[0][1]
        now = engine.next_at()


def rest(request: Generate, ids: list[int], sent: int) -> Generate:
    """What is left of a request after so many of its tokens."""
    wanted = request.sampling
    left = evolve(wanted, tokens_max=wanted.tokens_max - sent, tokens_min=max(0, wanted.tokens_min - sent))
    return evolve(
        request,
        id="another",
        tokens=request.tokens + TokenIds.of(ids[:sent]),
        resumed_tokens=request.resumed_tokens + sent,
        sampling=left,
    )


def check_cut_everywhere(request: Generate, lines: Sequence[list[int]]) -> None:
    ids, scores, finished = whole(request, lines)
    for sent in range(1, len(ids)):
        after, scores_after, end = whole(rest(request, ids, sent), lines)
        assert after == ids[sent:], f"cut after {sent}"
        assert scores_after == scores[sent:], f"cut after {sent}"
        assert (end.reason, end.matched) == (finished.reason, finished.matched)
        assert end.usage.completion_tokens == len(after)


@pytest.mark.parametrize("lines", [LINES, [[1, 2, 3]], ()], ids=["sentences", "one sentence", "no sentence"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(sampling: dict[str, Any], lines: Sequence[list[int]]) -> None:
    for name in "abcd":
        check_cut_everywhere(generate(name, prompt=6, tokens_max=30, logprobs=2, **sampling), lines)


@given(
    st.integers(0, 30),
    st.integers(1, 40),
    st.sets(st.integers(0, 20), max_size=3),
    st.sets(st.integers(0, 20), max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_it_does_so_for_whatever_was_asked(
    tokens_min: int, more: int, stops: set[Any], never: set[Any], ignore_eos: bool, sentences: bool, seed: int
) -> None:
    request = generate(
        "a",
        prompt=[seed, 1],
        tokens_max=tokens_min + more,
        tokens_min=tokens_min,
        stop_token_ids=tuple(stops),
        logit_bias=dict.fromkeys(never, -100.0),
        ignore_eos=ignore_eos,
        temperature=1.0,
        seed=seed,
    )
    check_cut_everywhere(request, LINES if sentences else ())


async def test_tokens_sent_before_are_part_of_the_prompt_and_may_be_cached(autojump_clock: MockClock) -> None:
    async with running() as engine:
        request = generate("a", prompt=8, tokens_max=9)
        ids, _, _ = await read(engine.submit(request))
        after, finished, _ = await read(engine.submit(rest(request, ids, 5)))
        assert after == ids[5:]
        assert finished == Finished(FinishReason.LENGTH, finished.usage)
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (13, 4)
        assert finished.usage.cached_tokens == 12
