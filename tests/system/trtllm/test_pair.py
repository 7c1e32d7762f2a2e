"""The contract of a pair on TensorRT-LLM's kind: three real host processes, with the recorded fake as their package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path

import pytest
import trio
from attrs import evolve

from actors.engines.trtllm.handed import HAND_OFF
from actors.engines.trtllm.spec import TrtllmSpec
from protocol.errors import AskerLeft, HandOffFailed
from protocol.messages.cluster import Leg
from protocol.token_ids import TokenIds
from tests.contracts.engine import at_rest, complete, new_id, request, slot
from tests.contracts.pair import Pair, check_pair, read, state_of
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import Fault, prompt_of
from tests.rig.trtllm_engines import SPEC, trtllm_engine

pytestmark = pytest.mark.realtime


@asynccontextmanager
async def trtllm_pair(folder: Path, spec: TrtllmSpec = SPEC) -> AsyncIterator[Pair]:
    """Run a prefill, a decode and an engine of both legs; the fake's KV caches are files in the folder."""
    async with AsyncExitStack() as stack:
        engines = []
        for leg in (Leg.PREFILL, Leg.DECODE, Leg.BOTH):
            made = trtllm_engine(evolve(spec, leg=leg), ESPALIER_FAKE_TRTLLM_FOLDER=str(folder))
            engine = (await stack.enter_async_context(made)).current
            assert engine is not None
            engines.append(engine)
        prefill, decode, whole = engines
        yield Pair(prefill, decode, whole, HAND_OFF)


async def test_a_trtllm_pair_keeps_the_contract(tmp_path: Path) -> None:
    async with trtllm_pair(tmp_path) as pair:

        @asynccontextmanager
        async def same() -> AsyncIterator[Pair]:
            yield pair

        await check_pair(same)
        assert not [*tmp_path.iterdir()], "a KV cache is held"


async def test_each_rank_of_a_prefill_hands_over_to_each_rank_of_a_decode(tmp_path: Path) -> None:
    async with trtllm_pair(tmp_path, evolve(SPEC, tensor_parallel=2, data_parallel=2)) as pair:
        for prefill, decode in product(range(2), repeat=2):
            wanted = request(pair.whole, 6, 20)
            expected, _ = await complete(pair.whole, wanted)
            async with (
                slot(pair.prefill, evolve(wanted, rank=prefill)) as prompt,
                slot(pair.decode, evolve(wanted, rank=decode, hand_off=await state_of(prompt))) as answer,
            ):
                ids, _ = await read(answer)
            assert ids == expected
        assert not [*tmp_path.iterdir()], "a KV cache is held"


async def test_a_decode_is_not_aborted_while_its_kv_cache_is_on_its_way(tmp_path: Path) -> None:
    """An abort then would lose blocks for good: the fake does not end such a request, so its slot stays taken."""
    async with trtllm_pair(tmp_path) as pair:
        wanted = evolve(request(pair.whole), id=new_id(), tokens=TokenIds.of(prompt_of(Fault.TRANSFER_HANGS, 9, 8)))
        async with slot(pair.prefill, wanted) as prompt:
            answer = pair.decode.submit(evolve(wanted, hand_off=await state_of(prompt)))
            await trio.sleep(0.1)
            pair.decode.abort(wanted.id)
            with trio.move_on_after(0.3) as waiting:
                await pair.decode.wait_released(wanted.id)
            assert waiting.cancelled_caught, "the slot was believed to be free"
            assert not answer.over.is_set()


async def test_aborts_of_a_decode_in_its_first_moments_lose_no_blocks(tmp_path: Path) -> None:
    async with trtllm_pair(tmp_path) as pair:
        for pause_s in (0.0, 0.001, 0.002, 0.004, 0.006, 0.01) * 5:
            wanted = request(pair.whole, 64, 20)
            async with (
                slot(pair.prefill, wanted) as prompt,
                slot(pair.decode, evolve(wanted, hand_off=await state_of(prompt))) as answer,
            ):
                await trio.sleep(pause_s)
            with pytest.raises((AskerLeft, HandOffFailed)):
                await answer.result()
        for engine in pair.engines:
            await at_rest(engine)
        longest = request(pair.whole, 8, pair.decode.info.request_tokens_max - 8)
        async with (
            slot(pair.prefill, longest) as prompt,
            slot(pair.decode, evolve(longest, hand_off=await state_of(prompt))) as answer,
        ):
            finished = await answer.result()
        assert finished is not None, "blocks are lost"
