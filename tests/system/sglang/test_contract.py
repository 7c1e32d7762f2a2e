"""The engine contract, and what only a real engine can show, on SGLang itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from actors.engines.port import Engine
from protocol.errors import AskerLeft, RequestError
from protocol.messages.generation import Generate, Sampling, Tokens
from tests.contracts.engine import (
    RELEASED_WITHIN_S,
    at_rest,
    check_engine,
    check_short_memory,
    complete,
    leave,
    new_id,
    request,
)
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

STORM = 200


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.nightly), True])
async def test_sglang_keeps_the_contract(make_engine: MakeEngine, *, ahead: bool) -> None:
    """On a CPU its scheduler does not run a step ahead by default, on a GPU it does."""
    async with make_engine(settings={"disable_overlap_schedule": False} if ahead else {}) as engine:
        assert engine.info.computes_ahead is ahead

        @asynccontextmanager
        async def same() -> AsyncIterator[Engine]:
            yield engine

        await check_engine(same)
        for fact in (answers_greedily_alike, aborts_a_long_prefill, survives_a_storm_of_aborts, says_what_it_is):
            await fact(engine)
            await at_rest(engine)


@pytest.mark.nightly
async def test_where_memory_is_short_sglang_goes_by_priority(make_engine: MakeEngine) -> None:
    """One key's long answers made another key's request of five tokens wait for 46 s."""
    async with make_engine(kv_tokens_max=512) as engine:
        await check_short_memory(engine)


async def answers_greedily_alike(engine: Engine) -> None:
    """One prompt has one greedy answer, alone and among others."""
    wanted = request(engine, 24)
    expected, _ = await complete(engine, wanted)
    got = []

    async def again() -> None:
        got.append((await complete(engine, Generate(new_id(), wanted.tokens, wanted.sampling)))[0])

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(again)
            nursery.start_soon(complete, engine, request(engine, 24))
    assert got == [expected] * 12


async def aborts_a_long_prefill(engine: Engine) -> None:
    """A prompt of many chunks is left in each of them, and no token of it comes.

    On a busy machine the whole answer may have been computed before this process runs again, but not each time.
    """
    unused = []
    for pause_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2):
        wanted = request(engine, 16, engine.info.request_tokens_max - 32)
        generation = engine.submit(wanted)
        await trio.sleep(pause_s)
        await leave(engine, wanted, generation)
        unused.append(generation.credit)
    assert 16 in unused, unused


async def survives_a_storm_of_aborts(engine: Engine) -> None:
    """Requests that leave at every moment leave nothing; those among them that stay are whole."""
    stays = request(engine, 64)
    expected, _ = await complete(engine, stays)
    whole = []

    async def leaver(number: int) -> None:
        wanted = request(engine, 64, 5 + number % 60)
        generation = engine.submit(wanted)
        with trio.move_on_after(0.002 * (number % 50)), pytest.raises(RequestError):
            await generation.result()
            raise AskerLeft("it was faster")
        engine.abort(wanted.id)
        with trio.fail_after(RELEASED_WITHIN_S):
            await engine.wait_released(wanted.id)

    async def stayer() -> None:
        whole.append((await complete(engine, Generate(new_id(), stays.tokens, stays.sampling)))[0])

    async with trio.open_nursery() as nursery:
        free = trio.CapacityLimiter(engine.info.running_max)

        async def limited(work: Callable[..., Awaitable[None]], *args: int) -> None:
            async with free:
                await work(*args)

        for number in range(STORM):
            nursery.start_soon(limited, leaver, number)
            if number % 20 == 0:
                nursery.start_soon(limited, stayer)
    assert whole == [expected] * (STORM // 20)


async def says_what_it_is(engine: Engine) -> None:
    """Its own limits, and that a seed means nothing to it on a CPU, which is so."""
    info = engine.info
    assert (info.kind, info.running_max, info.vocabulary_size, info.context_max) == ("sglang", 16, 512, 4096)
    assert info.honours_seed is False
    prompt = request(engine).tokens
    answers = set()
    for _ in range(4):
        sampling = Sampling(24, temperature=1.0, seed=7, ignore_eos=True)
        async with _whole(engine, Generate(new_id(), prompt, sampling)) as ids:
            answers.add(tuple(ids))
    assert len(answers) > 1


@asynccontextmanager
async def _whole(engine: Engine, wanted: Generate) -> AsyncIterator[list[int]]:
    generation = engine.submit(wanted)
    ids: list[int] = []
    async for reply in generation:
        if isinstance(reply, Tokens):
            ids += reply.ids
    await engine.wait_released(wanted.id)
    yield ids
