"""An answer with penalties that another engine goes on with is the answer of one engine, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from actors.engines.port import Engine
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from tests.contracts.engine import complete, new_id, request
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

TOKENS = 48
SENT = (1, 2, 5, 17, TOKENS - 1)
PENALTIES = (
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": -0.5, "repetition_penalty": 1.05},
)
PREFERRED = {300 + at: 16.0 for at in range(12)}  # a dozen tokens to choose from: they repeat, and penalties decide
EXACT = {"dtype": "float32"}  # in bfloat16 the shape of a batch decides between tokens that are about as likely


@pytest.mark.nightly
@pytest.mark.parametrize(("together", "ahead"), [(True, True), (False, True), (True, False)])
async def test_a_resumed_answer_with_penalties_equals_an_uninterrupted_one(
    make_engine: MakeEngine, *, together: bool, ahead: bool
) -> None:
    # A scheduler that runs ahead of its results, as on a GPU, counts by its requests and not by the steps of its batch.
    async with make_engine(settings=EXACT | {"disable_overlap_schedule": not ahead}) as engine:
        prompt = request(engine, 1).tokens
        uncut = [await answer(engine, prompt, 0, penalties) for penalties in ({}, *PENALTIES)]
        assert len(set(map(tuple, uncut))) > 1, "the penalties do something"
        cuts = [(index, sent) for index in range(len(uncut)) for sent in SENT]
        rests: dict[tuple[int, int], list[int]] = {}

        async def resume(index: int, sent: int) -> None:
            rests[index, sent] = await answer(
                engine, prompt + TokenIds.of(uncut[index][:sent]), sent, ({}, *PENALTIES)[index]
            )

        async with trio.open_nursery() as nursery:
            for index, sent in cuts:
                if together:
                    nursery.start_soon(resume, index, sent)
                else:
                    await resume(index, sent)
        assert rests == {(index, sent): uncut[index][sent:] for index, sent in cuts}


async def answer(engine: Engine, tokens: TokenIds, sent: int, penalties: dict[str, Any]) -> list[int]:
    sampling = Sampling(TOKENS - sent, temperature=0.0, ignore_eos=True, logit_bias=PREFERRED, **penalties)
    ids, _ = await complete(engine, Generate(new_id(), tokens, sampling, resumed_tokens=sent))
    return ids
