"""The output of a simulated engine depends on seed and prompt alone, and obeys the request's sampling options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.engines.simulated.output import OutputGenerator, pack_prompt
from protocol.messages.generation import Finished, FinishReason, Generate
from protocol.token_ids import TokenIds
from tests.rig.simulated_engines import generate, read, running, spec

LINES = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
EOS = 99


async def complete(request: Generate, lines: Sequence[list[int]] = LINES, **changes: int) -> tuple[list[int], Finished]:
    async with running(spec(eos_id=EOS, **changes), lines) as engine:
        ids, finished, _ = await read(engine.submit(request))
    return ids, finished


def many(**sampling: Any) -> Generate:
    return generate("a", tokens_max=200, **sampling)


async def test_sentences_are_whole_and_none_comes_twice_in_a_row(autojump_clock: MockClock) -> None:
    ids, _ = await complete(many(ignore_eos=True))
    lines, rest = [], ids
    while rest:
        line = next(line for line in LINES if line == rest[: len(line)] or rest == line[: len(rest)])
        lines.append(line)
        rest = rest[len(line) :]
    assert all(line != after for line, after in pairwise(lines))
    assert all(line in lines for line in LINES)


@pytest.mark.parametrize("lines", [LINES, []])
async def test_an_answer_ends_by_itself_at_a_drawn_length(lines: list[list[int]], autojump_clock: MockClock) -> None:
    lengths = set()
    for name in "abcdefgh":
        ids, finished = await complete(generate(name, tokens_max=100), lines, length_min=10, length_max=20)
        assert (finished.reason, finished.matched, ids[-1], ids.count(EOS)) == (FinishReason.STOP, EOS, EOS, 1)
        lengths.add(len(ids) - 1)
    assert min(lengths) >= 10
    assert max(lengths) <= (23 if lines else 20), "a sentence is said to its end"
    assert len(lengths) > 1


async def test_an_ignored_eos_is_never_generated(autojump_clock: MockClock) -> None:
    for lines in (LINES, ()):
        ids, finished = await complete(many(ignore_eos=True), lines, length_min=1, length_max=2)
        assert (len(ids), finished.reason) == (200, FinishReason.LENGTH)
        assert EOS not in ids


@pytest.mark.parametrize("sampling", [{}, {"ignore_eos": True}])
async def test_a_stop_token_is_delivered_and_named(sampling: dict[str, bool], autojump_clock: MockClock) -> None:
    ids, finished = await complete(many(stop_token_ids=(7,), **sampling))
    assert (ids[-1], finished.reason, finished.matched) == (7, FinishReason.STOP, 7)
    assert 7 not in ids[:-1]


@pytest.mark.parametrize("lines", [LINES, []])
async def test_a_bias_of_100_forces_a_token_and_its_opposite_forbids_one(
    lines: list[list[int]], autojump_clock: MockClock
) -> None:
    ids, _ = await complete(many(logit_bias={5: 100.0, 9: 100.0, 7: 99.0, 3: -100.0}), lines)
    assert ids == [5] * 200
    ids, _ = await complete(many(logit_bias={5: -100.0, 6: -200.0, EOS: -100.0, 8: -99.0}), lines)
    assert not {5, 6, EOS} & set(ids)
    assert len(ids) == 200
    ids, _ = await complete(many(logit_bias={EOS: -100.0}), lines, length_min=1, length_max=1)
    assert ids == (await complete(many(ignore_eos=True), lines))[0]
    ids, finished = await complete(many(logit_bias={EOS: 100.0}, tokens_min=3), lines)
    assert (len(ids), ids[-1], finished.matched) == (4, EOS, EOS)
    assert EOS not in ids[:-1]


# What it depends on -----------------------------------------------------------------------


def first(request: Generate, *, seed: int = 0, lines: Sequence[list[int]] = ()) -> list[Any]:
    speech = OutputGenerator.from_sentences(spec(seed=seed), lines)
    sequence = speech.answer(request, pack_prompt(request.tokens))
    return [next(sequence.ids) for _ in range(30)]


PROMPT = [1, 2, 3]


@pytest.mark.parametrize("lines", [LINES, []])
def test_the_same_prompt_has_the_same_greedy_answer(lines: list[list[int]]) -> None:
    assert first(generate("a", PROMPT), lines=lines) == first(generate("b", PROMPT, seed=1), lines=lines)
    assert len({tuple(first(generate("a", [number]), lines=lines)) for number in range(9)}) > 5
    assert len({tuple(first(generate("a", PROMPT), seed=number, lines=lines)) for number in range(9)}) > 5


@pytest.mark.parametrize("lines", [LINES, []])
def test_with_temperature_the_seed_decides_or_else_the_id(lines: list[list[int]]) -> None:
    def warm(name: str, seed: int | None = None) -> tuple[Any, ...]:
        return tuple(first(generate(name, PROMPT, temperature=1.0, seed=seed), lines=lines))

    assert warm("a", 1) == warm("b", 1)
    assert len({warm("a", seed) for seed in range(9)}) > 5
    assert warm("a") == warm("a")
    assert len({warm(name) for name in "abcdefghi"}) > 5


# Log probabilities ------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 5), st.integers(0, 30), st.integers(2, 50), st.sampled_from([0.0, 1.0]))
def test_log_probabilities_are_ordered_distinct_and_sum_to_less_than_one(
    place: int, token: int, most: int, vocabulary: int, temperature: float
) -> None:
    engine_spec = spec(vocabulary_size=vocabulary)
    speech, token, most = OutputGenerator.from_sentences(engine_spec, ()), token % vocabulary, min(most, vocabulary)
    sequence = speech.answer(generate("a", [1], temperature=temperature), pack_prompt(TokenIds.of([1])))
    scores = speech.logprob(sequence, place, token, most)
    assert scores == speech.logprob(sequence, place, token, most)
    ids, values = [each for each, _ in scores.top], [value for _, value in scores.top]
    assert len(ids) == len(set(ids)) == most
    assert all(0 <= each < vocabulary for each in ids)
    assert values == sorted(values, reverse=True)
    assert scores.logprob < 0
    assert sum(map(exp, values)) + (0 if token in ids else exp(scores.logprob)) < 1
    if token in ids:
        assert scores.top[ids.index(token)] == (token, scores.logprob)
    if temperature == 0 and most:
        assert ids[0] == token


async def test_each_token_has_its_log_probability_if_it_was_asked_for(autojump_clock: MockClock) -> None:
    async with running() as engine:
        ids, _, replies = await read(engine.submit(generate("a", logprobs=2)))
        assert [len(reply.logprobs) for reply in replies] == [1, 1, 1]
        assert [reply.logprobs[0].top[0][0] for reply in replies] == ids
        _, _, replies = await read(engine.submit(generate("b")))
        assert all(reply.logprobs == () for reply in replies)
