"""The log probabilities of a simulated engine's prompts are plausible, and the prompt's alone."""

from __future__ import annotations

from itertools import pairwise
from math import exp

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.simulated.scores import PromptScorer
from protocol.messages.generation import PromptScores, Started

VOCABULARY = 50
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


def scores(*pieces: list[int], likeliest: int = 3, seed: int = 0) -> PromptScores:
    scorer = PromptScorer(VOCABULARY, likeliest, seed)
    for piece in pieces:
        scorer.add(piece)
    Started(scores=scorer.scores()).check_tensors()
    return scorer.scores()


def numbers(found: PromptScores) -> list[float]:
    return [*found.logprobs.data.cast("B").cast("f")]


@settings(deadline=None)
@given(prompts, st.integers(0, 40), st.sampled_from([0, 1, 3, VOCABULARY, VOCABULARY + 9]))
def test_any_pieces_give_the_same_scores_with_the_likeliest_first(tokens: list[int], cut: int, likeliest: int) -> None:
    found = scores(tokens, likeliest=likeliest)
    assert found == scores(tokens[:cut], tokens[cut:], likeliest=likeliest)
    rows, width = found.top_ids.shape
    assert (rows, width) == (len(tokens) - 1, min(likeliest, VOCABULARY))
    values = found.top_logprobs.data.cast("B").cast("f").tolist()
    ids = found.top_ids.data.cast("B").cast("i").tolist()
    for row in range(rows):
        each, top = ids[row * width :][:width], values[row * width :][:width]
        assert len(set(each)) == width
        assert all(0 <= token < VOCABULARY for token in each)
        assert all(one >= other for one, other in pairwise(top))
        assert sum(map(exp, top)) < 1.001
        if tokens[row + 1] in each:
            assert numbers(found)[row] == top[each.index(tokens[row + 1])]


@settings(deadline=None)
@given(prompts, prompts, prompts)
def test_only_what_stands_before_a_token_decides(begin: list[int], one: list[int], other: list[int]) -> None:
    common = len(begin) - 1
    assert numbers(scores(begin + one))[:common] == numbers(scores(begin + other))[:common] == numbers(scores(begin))


def test_a_seed_gives_other_numbers() -> None:
    assert numbers(scores([1, 2, 3, 4])) != numbers(scores([1, 2, 3, 4], seed=7))
    assert len(set(numbers(scores(list(range(VOCABULARY)))))) > VOCABULARY // 2
