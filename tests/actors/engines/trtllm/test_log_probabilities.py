"""Both forms of TensorRT-LLM's log probabilities, and what it leaves out or adds."""

from __future__ import annotations

import pytest
from attrs import frozen

from actors.engines.trtllm.log_probabilities import Place, read, read_prompt
from protocol.errors import InternalError
from protocol.messages.generation import Logprob, Started
from protocol.token_ids import TokenIds


@frozen
class Found:
    logprob: float
    rank: int | None = None


def place(*pairs: tuple[int, float]) -> dict[int, Found]:
    """Return what is known of a place, the likeliest first."""
    return {token: Found(logprob, rank) for rank, (token, logprob) in enumerate(pairs, start=1)}


LIKELIEST = place((7, -0.5), (8, -1.0), (9, -3.0))


@pytest.mark.parametrize(
    ("found", "token", "top", "expected"),
    [
        (LIKELIEST, 7, 0, Logprob(-0.5)),
        (LIKELIEST, 7, 2, Logprob(-0.5, ((7, -0.5), (8, -1.0)))),
        (LIKELIEST, 9, 2, Logprob(-3.0, ((7, -0.5), (8, -1.0)))),
        (dict(reversed(LIKELIEST.items())), 9, 2, Logprob(-3.0, ((7, -0.5), (8, -1.0)))),
        (LIKELIEST, 8, 9, Logprob(-1.0, ((7, -0.5), (8, -1.0), (9, -3.0)))),
        ({5: Found(-1.0), 4: Found(-1.0)}, 4, 2, Logprob(-1.0, ((5, -1.0), (4, -1.0)))),
        ({5: Found(-1.0, 2), 4: Found(-1.0, 1)}, 4, 2, Logprob(-1.0, ((4, -1.0), (5, -1.0)))),
        (-2.5, 4, 0, Logprob(-2.5)),
        (-2.5, 4, 3, Logprob(-2.5)),
    ],
)
def test_a_place_is_read_in_either_form(found: Place, token: int, top: int, expected: Logprob) -> None:
    assert read([found], [token], top) == (expected,)


def test_numbers_beyond_the_tokens_are_left_out() -> None:
    assert read([-1.0, -2.0, -3.0], [4, 5], 0) == (Logprob(-1.0), Logprob(-2.0))


def test_a_number_that_is_missing_fails_the_answer() -> None:
    with pytest.raises(InternalError, match="the drawn token 4"):
        read([LIKELIEST], [4], 1)
    with pytest.raises(InternalError, match="0 log probabilities for 1 tokens"):
        read([], [4], 1)


def test_the_scores_of_a_prompt_begin_with_its_second_token() -> None:
    found = [place((8, -0.25), (1, -2.0)), place((3, -0.5), (9, -0.75)), place((4, -1.0))]
    scores = read_prompt(found, TokenIds.of([7, 8, 9]), 2, 1)
    Started(scores=scores).check_tensors()
    assert scores.logprobs.data.cast("B").cast("f").tolist() == [-0.25, -0.75]
    assert scores.top_ids.data.cast("B").cast("i").tolist() == [8, 3]
    assert scores.top_logprobs.data.cast("B").cast("f").tolist() == [-0.25, -0.5]
    assert scores.top_ids.shape == (2, 1)


@pytest.mark.parametrize("top", [0, 2])
def test_a_prompt_of_one_token_has_no_scores(top: int) -> None:
    scores = read_prompt([place((4, -1.0))], TokenIds.of([7]), 0, top)
    Started(scores=scores).check_tensors()
    assert (scores.logprobs.shape, scores.top_ids.shape) == ((0,), (0, top))


def test_a_prompt_whose_scores_are_not_all_there_fails() -> None:
    tokens = TokenIds.of([7, 8, 9])
    with pytest.raises(InternalError, match="the drawn token 9"):
        read_prompt([LIKELIEST, place((1, -1.0))], tokens, 2, 0)
    with pytest.raises(InternalError, match="1 log probabilities for 2 tokens"):
        read_prompt([LIKELIEST], tokens, 2, 0)
    with pytest.raises(InternalError, match="fewer than 2 likely tokens in place 0"):
        read_prompt([place((8, -1.0)), LIKELIEST], tokens, 2, 2)
