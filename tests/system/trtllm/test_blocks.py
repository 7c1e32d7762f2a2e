"""The blocks in the KV memory of TensorRT-LLM's kind, as its host reports them to routers."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve

from actors.engines.blocks.block_log import BlockLog
from protocol.block_hashes import block_hashes
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from tests.contracts.engine import complete, request
from tests.rig.nodes import until
from tests.rig.trtllm_engines import SPEC, trtllm_engine

pytestmark = pytest.mark.realtime

SEEN_WITHIN_S = 10.0
PROMPT = TokenIds.of(range(100, 100 + 3 * SPEC.page_size))


async def test_a_router_finds_the_blocks_of_a_prompt_until_a_flush_and_those_of_the_next_one() -> None:
    async with trtllm_engine(evolve(SPEC, publishes=True)) as engines, trio.open_nursery() as nursery:
        engine, log = engines.current, BlockLog("a router's")
        assert engine is not None
        nursery.start_soon(engine.watch_blocks, log.merge)

        async def wait_for(salt: str | None, *, present: bool) -> None:
            own = {*block_hashes(PROMPT.tolist(), SPEC.page_size, salt)}
            assert len(own) == 3
            await until(
                lambda: own.issubset(each for _, hashes in log.blocks() for each in hashes) is present, SEEN_WITHIN_S
            )

        for salt in (None, "a key's"):
            wanted = evolve(request(engine, 4), tokens=PROMPT, cache_salt=salt)
            await complete(engine, wanted)
            await wait_for(salt, present=True)
        await engine.operate(FlushCache())
        await wait_for(None, present=False)
        for salt in (None, "a key's"):
            await complete(engine, evolve(request(engine, 4), tokens=PROMPT, cache_salt=salt))
            await wait_for(salt, present=True)
        nursery.cancel_scope.cancel(reason="the test has ended")
