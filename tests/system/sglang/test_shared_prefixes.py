"""The real engine behind its actor: of a burst of prompts with the same beginning one computes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from actors.decode import decode
from actors.engines.port import Engine
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.shared_prefixes import SharedPrefixes
from actors.engines.slots.slots import Slots
from protocol.messages.generation import Finished, Generate, Sampling
from protocol.token_ids import TokenIds
from tests.contracts.engine import new_id, request
from tests.rig.calls import AnyAddress, priority_inbox
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

SLOTS = 8
PAGE = 16


async def found_together(engine: Engine, prompts: Sequence[TokenIds]) -> list[int]:
    """Send prompts at once; return how much of each was found in the cache, the least first."""
    found, prefixes = list[int](), SharedPrefixes(PAGE)
    address: AnyAddress
    address, inbox = priority_inbox(len(prompts), lambda _: 0)

    async def ask(prompt: TokenIds) -> None:
        wanted = Generate(new_id(), prompt, Sampling(4, temperature=0, ignore_eos=True))
        async with address.ask(wanted, 4) as replies:
            finished = await replies.result()
            assert isinstance(finished, Finished)
            found.append(finished.usage.cached_tokens)

    async with trio.open_nursery() as nursery:
        await nursery.start(decode, inbox, [Slots(engine, SLOTS, Deadlines(), prefixes=prefixes)])
        async with trio.open_nursery() as asking:
            for prompt in prompts:
                asking.start_soon(ask, prompt)
        nursery.cancel_scope.cancel()
    assert not len(prefixes)
    return sorted(found)


@pytest.mark.parametrize(
    "run_ahead", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["overlap", "no overlap"]
)
async def test_a_beginning_that_several_prompts_share_is_computed_once(
    make_engine: MakeEngine, *, run_ahead: bool
) -> None:
    settings = {"disable_overlap_schedule": not run_ahead}
    async with make_engine(settings=settings, slots=SLOTS, kv_tokens_max=16_384, context_max=4_096) as engine:
        assert engine.info.page_size == PAGE
        beginning = request(engine, prompt=640).tokens
        prompts = [beginning + request(engine, prompt=40).tokens for _ in range(6)]
        assert await found_together(engine, prompts) == [0] + [640] * 5
        equal = [request(engine, prompt=20 * PAGE).tokens] * 4
        assert await found_together(engine, equal) == [0] + [19 * PAGE] * 3, "the last token is always computed"
