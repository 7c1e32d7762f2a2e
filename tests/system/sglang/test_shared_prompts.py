"""The real engine: prompts with the same beginning that wait together compute it once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from actors.engines.port import Engine
from protocol.messages import Generate, Sampling
from tests.contracts.engine import complete, new_id, request, serves_on
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

PAGE = 16
LONG = 1_500  # tokens of a prompt that the scheduler computes while others come
RUN_AHEAD = pytest.mark.parametrize(
    "run_ahead", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["overlap", "no overlap"]
)


@asynccontextmanager
async def engine_of(make_engine: MakeEngine, *, run_ahead: bool, chunk: int = 4_096) -> AsyncIterator[Engine]:
    settings = {"disable_overlap_schedule": not run_ahead}
    spec = {"slots": 8, "kv_tokens_max": 16_384, "context_max": 4_096, "prefill_chunk": chunk}
    async with make_engine(settings=settings, **spec) as engine:
        yield engine


async def found_together(engine: Engine, prompts: Sequence[list[int]], salts: Sequence[str | None] = ()) -> list[int]:
    """Send prompts while the scheduler computes another one; return how much of each was found in the cache."""
    found = [-1] * len(prompts)

    async def ask(place: int) -> None:
        salt = salts[place] if salts else None
        wanted = Generate(new_id(), prompts[place], Sampling(4, temperature=0, ignore_eos=True), cache_salt=salt)
        found[place] = (await complete(engine, wanted))[1].usage.cached_tokens

    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, engine, request(engine, prompt=LONG))
        await trio.sleep(0.02)
        for place in range(len(prompts)):
            nursery.start_soon(ask, place)
    return found


def shared(engine: Engine, tokens: int, count: int, own: int = 40) -> list[list[int]]:
    """Return prompts with the same beginning."""
    beginning = request(engine, prompt=tokens).tokens
    return [beginning + request(engine, prompt=own).tokens for _ in range(count)]


@RUN_AHEAD
async def test_a_beginning_that_several_prompts_share_is_computed_once(
    make_engine: MakeEngine, *, run_ahead: bool
) -> None:
    async with engine_of(make_engine, run_ahead=run_ahead) as engine:
        assert sorted(await found_together(engine, shared(engine, 320, 5))) == [0, 320, 320, 320, 320]

        known = request(engine, prompt=160).tokens
        await complete(engine, Generate(new_id(), known, Sampling(1)))
        prompts = [known + rest for rest in shared(engine, 160, 4)]
        assert sorted(await found_together(engine, prompts)) == [160, 320, 320, 320], "a part is cached already"

        equal = [request(engine, prompt=20 * PAGE).tokens] * 4
        last = 19 * PAGE  # what is computed of every prompt
        assert sorted(await found_together(engine, equal)) == [0, last, last, last]

        await serves_on(engine)


@pytest.mark.nightly
@RUN_AHEAD
async def test_prompts_wait_for_no_cache_that_is_not_theirs(make_engine: MakeEngine, *, run_ahead: bool) -> None:
    async with engine_of(make_engine, run_ahead=run_ahead) as engine:
        prompts = shared(engine, 320, 4)
        assert await found_together(engine, prompts, ["a", "b", "c", None]) == [0] * 4
        again = await found_together(engine, prompts, ["b", "c", "a", None])
        assert again == [320, 320, 320, 352], "what differs was computed with the other salts"


@pytest.mark.nightly
@RUN_AHEAD
async def test_a_long_beginning_is_shared_chunk_by_chunk(make_engine: MakeEngine, *, run_ahead: bool) -> None:
    async with engine_of(make_engine, run_ahead=run_ahead, chunk=128) as engine:
        found = sorted(await found_together(engine, shared(engine, 640, 4)))
        assert found == [0, 640, 640, 640]


@pytest.mark.nightly
@RUN_AHEAD
async def test_nobody_waits_for_a_prompt_that_is_cancelled(make_engine: MakeEngine, *, run_ahead: bool) -> None:
    async with engine_of(make_engine, run_ahead=run_ahead, chunk=128) as engine:
        first, *others = shared(engine, 1_280, 4)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for prompt in others:
                    nursery.start_soon(complete_after, 0.01, engine, prompt)
                with trio.move_on_after(0.03):  # some of its ten chunks are computed by then
                    await complete_after(0.0, engine, first)
        await serves_on(engine)


async def complete_after(delay_s: float, engine: Engine, prompt: list[int]) -> None:
    await trio.sleep(delay_s)
    await complete(engine, Generate(new_id(), prompt, Sampling(4, temperature=0, ignore_eos=True)))


@pytest.mark.nightly
async def test_without_a_cache_nobody_waits(make_engine: MakeEngine) -> None:
    async with make_engine(settings={"disable_radix_cache": True}, slots=8, kv_tokens_max=16_384) as engine:
        with trio.fail_after(30):
            assert await found_together(engine, shared(engine, 320, 5)) == [0] * 5
