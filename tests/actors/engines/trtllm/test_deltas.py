"""Answers that repeat themselves, as replies with each token once."""

from __future__ import annotations

from itertools import accumulate

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.trtllm.deltas import Deltas, Ending, ending
from actors.engines.trtllm.log_probabilities import Place
from protocol.errors import AskerLeft, InternalError
from protocol.messages.generation import FinishReason, Tokens, one_token


@define
class Answer:
    """An answer as TensorRT-LLM has it: one object that grows."""

    token_ids: list[int] | None = field(factory=list)
    logprobs: list[Place] | None = field(factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


STEPS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=12)


@given(STEPS, st.booleans(), st.integers(0, 3))
def test_the_parts_of_an_answer_joined_are_the_answer(steps: list[list[int]], scored: bool, ahead: int) -> None:
    """`ahead`: log probabilities of tokens to come, which the next step gives again."""
    whole = [token for step in steps for token in step]
    answer, deltas, parts = Answer(), Deltas(0 if scored else None), list[Tokens]()
    assert answer.token_ids is not None
    for step, end in zip(steps, accumulate(map(len, steps)), strict=True):
        answer.token_ids.extend(step)
        answer.logprobs = [-float(place) for place in range(end + ahead)]
        part = deltas.take(answer)
        assert (part is None) is (not step)
        assert deltas.take(answer) is None, "nothing comes twice"
        if part is not None:
            parts.append(part)
    assert [token for part in parts for token in part.ids] == whole
    logprobs = [each.logprob for part in parts for each in part.logprobs]
    assert logprobs == ([-float(place) for place in range(len(whole))] if scored else [])
    assert deltas.count == len(whole)


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 4))
def test_an_answer_that_shrinks_takes_nothing_back_and_repeats_nothing(ids: list[int], cut: int) -> None:
    deltas = Deltas()
    deltas.take(Answer(ids))
    assert deltas.take(Answer(ids[:-cut])) is None
    assert deltas.count == len(ids)
    assert deltas.take(Answer([*ids, 7])) == Tokens((7,))


def test_a_part_stays_as_it_is_when_the_answer_grows() -> None:
    answer, deltas = Answer([1, 2]), Deltas()
    part = deltas.take(answer)
    assert answer.token_ids is not None
    answer.token_ids.append(3)
    assert part == Tokens((1, 2))
    assert deltas.take(answer) is one_token(3), "a single token is an object that is there already"


def test_an_answer_without_any_token_has_no_parts() -> None:
    assert Deltas().take(Answer(None, None)) is None


def test_tokens_without_their_log_probabilities_fail_the_answer() -> None:
    with pytest.raises(InternalError, match="1 log probabilities for 2 tokens"):
        Deltas(1).take(Answer([1, 2], [-0.5]))
    with pytest.raises(InternalError):
        Deltas(0).take(Answer([1], None))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer([1]), None),
        (Answer([1], finish_reason="not_finished"), None),
        (Answer([1], finish_reason="length"), Ending(FinishReason.LENGTH)),
        (Answer([1, 2], finish_reason="length"), Ending(FinishReason.LENGTH)),
        (Answer([1, 2], finish_reason="stop"), Ending(FinishReason.STOP, 2)),
        (Answer([1, 5], finish_reason="stop", stop_reason=5), Ending(FinishReason.STOP, 5)),
        (Answer([1, 5], finish_reason="stop"), Ending(FinishReason.STOP)),
        (Answer([], finish_reason="stop"), Ending(FinishReason.STOP)),
    ],
)
def test_an_answer_ends_for_its_reason(answer: Answer, expected: Ending | None) -> None:
    assert ending(answer, ends=(2, 3)) == expected


def test_an_answer_that_was_cancelled_or_is_not_whole_has_an_error() -> None:
    with pytest.raises(AskerLeft):
        ending(Answer([1], finish_reason="cancelled"), ends=())
    for reason in ("timeout", "error", "x" * 500):
        with pytest.raises(InternalError) as failed:
            ending(Answer([1], finish_reason=reason), ends=())
        assert len(str(failed.value)) < 120
