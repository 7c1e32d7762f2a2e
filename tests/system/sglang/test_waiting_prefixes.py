"""The real engine: what a waiting request is to find in the cache is evicted after all that nobody waits for."""

from __future__ import annotations

import pytest
import trio

from actors.engines.port import Engine
from protocol.messages import Generate, Sampling
from tests.contracts.engine import complete, new_id, request
from tests.system.sglang.conftest import MakeEngine

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PREFIX = 1_600  # tokens, of which a memory of 8,192 holds five
LONG = 3_200


async def found(engine: Engine, tokens: list[int]) -> int:
    wanted = Generate(new_id(), tokens, Sampling(2, temperature=0, ignore_eos=True))
    return (await complete(engine, wanted))[1].usage.cached_tokens


async def test_the_prefix_of_a_waiting_request_is_not_evicted_for_the_prompt_before_it(make_engine: MakeEngine) -> None:
    async with make_engine(slots=8, kv_tokens_max=8_192, context_max=4_096, prefill_chunk=128) as engine:
        oldest, *others = (request(engine, prompt=PREFIX).tokens for _ in range(4))
        for prefix in (oldest, *others):
            assert await found(engine, prefix) == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found, engine, request(engine, prompt=LONG).tokens)  # needs the memory of one of them
            await trio.sleep(0.02)  # into its 25 steps, in which there is no room for another prompt
            assert await found(engine, oldest + request(engine, prompt=40).tokens) == PREFIX
        assert await found(engine, others[0]) < PREFIX - 16, "something was evicted"
