"""An answer with penalties that another engine goes on with is the answer of one engine, token for token."""

from __future__ import annotations

import pytest

from protocol.messages import Generate, Sampling
from tests.contracts.engine import complete, new_id, request

pytestmark = pytest.mark.engine

TOKENS = 48
PENALTIES = (
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": -0.5, "repetition_penalty": 1.05},
)


async def test_d10_an_answer_with_penalties_goes_on_as_if_it_had_not_been_cut(make_engine):
    async with make_engine() as engine:
        prompt = request(engine, 1).tokens
        plain = await answer(engine, prompt, 0, {})
        for penalties in PENALTIES:
            whole = await answer(engine, prompt, 0, penalties)
            assert whole != plain, "the penalties do something"
            rests: dict[int, list[int]] = {}
            for said in (1, 2, 5, 17, TOKENS - 1):  # alone: in another batch bfloat16 may round to another token
                rests[said] = await answer(engine, [*prompt, *whole[:said]], said, penalties)
            assert rests == {said: whole[said:] for said in rests}, penalties


async def answer(engine, tokens, said, penalties):
    sampling = Sampling(TOKENS - said, temperature=0.0, ignore_eos=True, **penalties)
    ids, _ = await complete(engine, Generate(new_id(), tokens, sampling, said=said))
    return ids
