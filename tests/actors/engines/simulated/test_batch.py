"""The steps of a simulated engine: their exact times, one token for each running request, and chunks of prompts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

import actors.engines.simulated.batch as batch_module
from actors.engines.simulated.batch import Batch
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import Costs
from actors.engines.simulated.step import BatchUpdate
from protocol.cost import ANSWER_TOKENS_MAX
from protocol.errors import AskerLeft, EngineLost
from protocol.messages.engine import EngineLoad
from protocol.messages.operations import FlushCache
from tests.rig.simulated_engines import batch, finished, generate, read, running, spec, timed
from tests.system.simulator import Steps, counting

PRICED = Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.125, per_kv_token_s=0.0078125)


# What time costs --------------------------------------------------------------------------


async def test_a_request_alone_takes_exactly_what_is_stated(autojump_clock: MockClock) -> None:
    async with running(spec(costs=PRICED)) as engine:
        times = await timed(engine.submit(generate("a", prompt=10, tokens_max=3)))
    first = 1 + 0.25 * 10 + 0.125
    second = first + 1 + 0.125 + 10 / 128  # the prompt's keys and values are read
    third = second + 1 + 0.125 + 11 / 128  # and those of the first token
    assert times == [first, second, third]


async def test_a_cached_prefix_is_not_paid_for_again(autojump_clock: MockClock) -> None:
    prompt = list(range(16))
    async with running(spec(costs=Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.0))) as engine:
        assert await timed(engine.submit(generate("a", prompt, tokens_max=1))) == [5.0]
        assert await timed(engine.submit(generate("b", prompt, tokens_max=1))) == [5.0 + 1 + 4 * 0.25]


async def test_a_request_that_comes_during_a_step_joins_the_next(autojump_clock: MockClock) -> None:
    async with running() as engine:
        engine.submit(generate("a", tokens_max=9))
        await trio.sleep(1.5)
        assert await timed(engine.submit(generate("b", tokens_max=2))) == [3, 4]


async def test_the_engine_wakes_once_a_step_however_many_answer(autojump_clock: MockClock) -> None:
    def count_steps(steps: Steps) -> int:
        return sum(taken for name, taken in steps.by_name.items() if name == "run")

    async with running() as engine:
        answers = [engine.submit(generate(name, tokens_max=20)) for name in "abcd"]
        await trio.sleep(0.5)
        with counting() as steps:
            await trio.sleep(10)
        assert count_steps(steps) == 10
        assert not any(answer.over.is_set() for answer in answers)


# Chunked prefill --------------------------------------------------------------------------


async def test_a_long_prompt_delays_others_by_one_chunk_at_most(autojump_clock: MockClock) -> None:
    costs = Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.0)
    async with running(spec(costs=costs, prefill_chunk=8)) as engine, trio.open_nursery() as nursery:
        times: list[float] = []
        nursery.start_soon(timed, engine.submit(generate("a", prompt=4, tokens_max=20)), times)
        await trio.sleep(2.5)
        long = await timed(engine.submit(generate("b", prompt=80, tokens_max=1)))
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) == 1 + 8 * 0.25
    assert gaps.count(3) == 10, "one step a chunk"
    assert long == [3 + 10 * 3]


async def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_later(autojump_clock: MockClock) -> None:
    async with running(spec(prefill_chunk=8)) as engine:
        short = engine.submit(generate("a", prompt=4, tokens_max=1))
        long = engine.submit(generate("b", prompt=20, tokens_max=1))
        await short.over.wait()
        assert trio.current_time() == 1
        await long.over.wait()
        assert trio.current_time() == 3, "it had the rest of the first chunk"


# KvMemory -----------------------------------------------------------------------------------


async def counts(engine: SimulatedEngine) -> tuple[int, int]:
    """Return the numbers of requests that run, and that wait."""
    load = await engine.load()
    return load.running, load.waiting


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_very_long_answers_are_preempted_where_memory_is_short_and_all_come_whole(
    prefix_cache: bool, autojump_clock: MockClock
) -> None:
    """As in SGLang, an answer counts as one of 4,096 tokens at most until it is longer."""
    size, prompt_s = 3 * ANSWER_TOKENS_MAX // 2, 0.25 * 4
    asked = [generate(name, prompt=4, tokens_max=size - 100 * number) for number, name in enumerate("abc")]
    asked.append(generate("d", prompt=4, tokens_max=10))
    costs = Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.0, per_kv_token_s=0.0)
    keys: dict[str, Any] = {"context_max": 2 * size, "prefix_cache": prefix_cache, "slots": 3, "costs": costs}
    alone = []
    async with running(spec(kv_tokens_max=100_000, **keys)) as engine:
        for each in asked:
            began_at = trio.current_time()
            alone.append((await read(engine.submit(each)))[:2])
            assert trio.current_time() == began_at + prompt_s + each.sampling.tokens_max, "nothing is computed twice"
    async with running(spec(kv_tokens_max=2 * size + 100, **keys)) as engine:
        answers = [engine.submit(each) for each in asked]
        await trio.sleep(100)
        assert await counts(engine) == (3, 1)
        await trio.sleep(ANSWER_TOKENS_MAX)
        assert await counts(engine) == (2, 2), "the third one was preempted, and comes before the fourth"
        assert [(await read(answer))[:2] for answer in answers] == alone, "also what was cached for them"
        assert await engine.load() == EngineLoad(0, 0, 0)


async def test_no_request_overtakes_one_that_waits_for_memory(autojump_clock: MockClock) -> None:
    async with running(spec(kv_tokens_max=48)) as engine:
        first, _, small = (
            engine.submit(generate(n, prompt=p, tokens_max=4)) for n, p in (("a", 36), ("b", 30), ("c", 2))
        )
        await first.over.wait()
        assert trio.current_time() == 4
        assert await timed(small) == [5, 6, 7, 8]


requests = st.tuples(
    st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.sampled_from([None, 0, 1, 2.5]), st.integers(0, 6)
)


@pytest.mark.parametrize("answer_max", [2, ANSWER_TOKENS_MAX])
@given(st.lists(requests, min_size=1, max_size=12), st.sampled_from([1, 4, 16]), st.integers(1, 20), st.booleans())
def test_whatever_is_asked_everything_ends_and_all_memory_comes_home(
    answer_max: int, asked: list[Any], page_size: int, chunk: int, cache: bool
) -> None:
    with patch.object(batch_module, "ANSWER_TOKENS_MAX", answer_max):
        check_all_ends(asked, page_size, chunk, cache)


def check_all_ends(asked: list[Any], page_size: int, chunk: int, cache: bool) -> None:
    engine = batch(kv_tokens_max=64, page_size=page_size, prefill_chunk=chunk, prefix_cache=cache, slots=3)
    moves = [(at_s, number, "submit") for number, (*_, at_s) in enumerate(asked)]
    moves += [(at_s + after, number, "abort") for number, (*_, after, at_s) in enumerate(asked) if after is not None]
    tokens: dict[str, int] = {}
    over: list[str] = []

    def note(update: BatchUpdate) -> None:
        for name in update.emitted:
            tokens[name] = tokens.get(name, 0) + 1
        over.extend(name for name, _ in (*update.ended, *update.failed))

    for at_s, number, what in sorted(moves):
        while engine.next_at() <= at_s:
            note(engine.advance(max(engine.next_at(), 0.0)))
        if what == "submit":
            prompt, tokens_max, kind, *_ = asked[number]
            engine.submit(generate(str(number), [kind] * prompt, tokens_max), at_s)
        else:
            engine.abort(str(number), at_s)
        assert 0 <= engine.load().kv_tokens_used <= 64
    now = max(at_s for at_s, *_ in moves)
    for _ in range(1000):
        if engine.next_at() == float("inf"):
            break
        now = max(now, engine.next_at())
        note(engine.advance(now))
    assert sorted(over) == sorted(map(str, range(len(asked))))
    assert EngineLoad.of_ranks([engine.load()]).totals == EngineLoad(0, 0, 0)
    assert engine.memory.free + engine.memory.idle == engine.memory.pages_max
    for number, (_, tokens_max, _, after, _) in enumerate(asked):
        assert tokens.get(str(number), 0) == tokens_max or after is not None


# Aborts -----------------------------------------------------------------------------------


async def test_an_abort_frees_slot_and_memory_at_once_and_not_at_the_end_of_the_step(autojump_clock: MockClock) -> None:
    async with running(spec(slots=1)) as engine:
        left, waits = (engine.submit(generate(name, tokens_max=50)) for name in "ab")
        await trio.sleep(1.25)
        engine.abort("a")
        await engine.wait_released("a")
        assert trio.current_time() == 1.25
        assert await engine.load() == EngineLoad(0, 1, 0)
        with pytest.raises(AskerLeft):
            await left.result()
        await anext(waits)
        assert trio.current_time() == 3, "a step that has begun ends as it would have"


async def test_a_release_may_cost_time_and_counts_until_then(autojump_clock: MockClock) -> None:
    costs = Costs(fixed_s=1.0, per_prefill_token_s=0.0, per_running_s=0.0, release_s=2.0)
    async with running(spec(slots=1, costs=costs)) as engine:
        engine.submit(generate("a", prompt=5, tokens_max=50))
        after = engine.submit(generate("b", tokens_max=1))
        waiting = engine.submit(generate("c", tokens_max=1))
        await trio.sleep(1.5)
        engine.abort("a")
        engine.abort("c")
        await engine.wait_released("c")
        assert trio.current_time() == 1.5, "who waits holds nothing"
        assert waiting.over.is_set()
        assert await engine.load() == EngineLoad(1, 1, 5)
        await engine.wait_released("a")
        assert trio.current_time() == 3.5
        await after.over.wait()
        assert trio.current_time() == 4.5


async def test_the_end_of_the_actor_is_the_end_of_all_answers(autojump_clock: MockClock) -> None:
    async with running() as engine:
        whole = engine.submit(generate("a", tokens_max=1))
        cut = engine.submit(generate("b", tokens_max=9))
        await trio.sleep(1.5)
    with pytest.raises(EngineLost):
        await cut.result()
    assert (await finished(whole)).usage.completion_tokens == 1
    await engine.wait_lost()
    await engine.wait_released("b")
    with pytest.raises(EngineLost):
        engine.submit(generate("c"))
    with pytest.raises(EngineLost):
        await engine.load()
    with pytest.raises(EngineLost):
        await engine.operate(FlushCache())


# Real time is late ------------------------------------------------------------------------


def ends_of(engine: Batch, turns: list[float]) -> list[float]:
    """When steps would end, if the engine were woken at these times."""
    engine.submit(generate("a", tokens_max=100), 0.0)
    engine.advance(0.0)
    ends = [engine.next_at()]
    for now in turns:
        assert len(engine.advance(now).emitted) <= 1, "no burst"
        ends.append(engine.next_at())
    return ends


def test_small_delays_do_not_add_up_and_what_is_late_by_more_than_a_step_begins_anew() -> None:
    assert ends_of(batch(), [1.25, 2.5, 3.125, 4.0]) == [1, 2, 3, 4, 5]
    assert ends_of(batch(), [1.0, 7.5, 8.5]) == [1, 2, 8.5, 9.5]
