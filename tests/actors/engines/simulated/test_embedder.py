"""The simulated embedder: the contract of every embedder, its exact times, its faults, and what it makes of ids."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.embedder import BATCH_TOKENS_MAX, SimulatedEmbedder, vector
from actors.engines.simulated.spec import EncodingCosts, Faults
from protocol.errors import AskerLeft, EngineDied, EngineLost, EngineRefused, Overloaded
from protocol.messages.engine import EngineInfo, EngineLoad
from tests.contracts import embedder as contract
from tests.contracts.embedder import embed
from tests.rig.embedders import COSTS, EMBEDDER, SCORER, SCORES, VECTORS, running_embedder, text
from tests.rig.tasks import expect_error
from tests.system.simulator import simulate

PRICED = EncodingCosts(fixed_s=1.0, per_item_s=0.5, per_token_s=0.125)


def simulated(costs: EncodingCosts = COSTS, info: EngineInfo = EMBEDDER, **more: Any) -> SimulatedEmbedder:
    return SimulatedEmbedder(info, 4, random.Random(0), costs, **more)


@pytest.mark.parametrize(
    "info", [EMBEDDER, SCORER, evolve(EMBEDDER, embedding=evolve(VECTORS, normalised=False))], ids=["v", "s", "long"]
)
async def test_the_simulated_embedder_keeps_the_contract(info: EngineInfo, autojump_clock: MockClock) -> None:
    await contract.check_embedder(lambda: running_embedder(simulated(info=info)))


@pytest.mark.parametrize("seed", range(3))
def test_the_contract_holds_in_any_order_of_tasks(seed: int) -> None:
    async def scenario(_: random.Random) -> None:
        await contract.check_embedder(lambda: running_embedder(simulated(EncodingCosts(fixed_s=0.001))))

    simulate(scenario, seed)


# Time ---------------------------------------------------------------------------------------


async def test_a_batch_costs_the_sum_of_its_prices(autojump_clock: MockClock) -> None:
    async with running_embedder(simulated(PRICED)) as engine:
        answer = engine.submit(embed(text(1, 2), text(3)))
        await answer.over.wait()
        assert trio.current_time() == 1 + 2 * 0.5 + 3 * 0.125


async def test_requests_share_batches_item_by_item_so_that_a_short_one_passes_a_long_one(
    autojump_clock: MockClock,
) -> None:
    half = text(*[1] * (BATCH_TOKENS_MAX // 2))
    info = evolve(EMBEDDER, request_tokens_max=BATCH_TOKENS_MAX)
    async with running_embedder(simulated(info=info)) as engine:
        long, short = engine.submit(embed(*[half] * 6)), engine.submit(embed(half))
        await short.over.wait()
        assert trio.current_time() == 1
        assert await engine.load() == EngineLoad(2, 3, BATCH_TOKENS_MAX)
        await long.over.wait()
        assert trio.current_time() == 4


async def test_requests_beyond_the_running_ones_wait_and_then_are_refused(autojump_clock: MockClock) -> None:
    async with running_embedder(simulated(info=evolve(EMBEDDER, running_max=1))) as engine:
        answers = [engine.submit(embed(text(number))) for number in range(5)]
        with pytest.raises(Overloaded):
            engine.submit(embed(text(1)))
        for number, answer in enumerate(answers):
            await answer.over.wait()
            assert trio.current_time() == number + 1


async def test_what_is_computed_is_released_at_the_end_of_its_batch_and_what_waits_at_once(
    autojump_clock: MockClock,
) -> None:
    async with running_embedder(simulated(info=evolve(EMBEDDER, running_max=1))) as engine:
        requests = [embed(text(1), text(2, 3)), embed(text(4))]
        first, second = map(engine.submit, requests)
        await trio.sleep(0.25)
        assert await engine.load() == EngineLoad(2, 1, 3)
        for each in requests:
            engine.abort(each.id)
        assert second.over.is_set()
        assert await engine.load() == EngineLoad(2, 0, 3)
        with pytest.raises(AskerLeft):
            await first.result()
        assert trio.current_time() == 1


# Faults -------------------------------------------------------------------------------------


async def test_a_stuck_embedder_keeps_what_is_aborted_until_it_is_well(autojump_clock: MockClock) -> None:
    async with running_embedder(simulated(faults=Faults(stuck=1.0))) as engine:
        requests = [embed(text(1)), embed(text(2))]
        answers = [engine.submit(each) for each in requests]
        await trio.sleep(0.5)
        for each in requests:
            engine.abort(each.id)
        await trio.sleep(5)
        assert not any(answer.over.is_set() for answer in answers)
        engine.inject(Faults())
        assert all(answer.over.is_set() for answer in answers)
        assert await engine.load() == EngineLoad(0, 0, 0)


async def test_a_request_that_is_found_wrong_fails_alone(autojump_clock: MockClock) -> None:
    engine = simulated()
    async with running_embedder(engine):
        engine.inject(Faults(refuse=1.0))
        refused = engine.submit(embed(text(1), text(2)))
        await trio.sleep(0.5)
        with pytest.raises(EngineRefused):
            await refused.result()
        engine.inject(Faults())
        good = engine.submit(embed(text(1)))
        await good.over.wait()
        assert trio.current_time() == 2
        assert await engine.load() == EngineLoad(0, 0, 0)


async def test_a_pause_delays_the_end_of_a_batch(autojump_clock: MockClock) -> None:
    async with running_embedder(simulated(faults=Faults(stall=1.0, stall_s=2.0))) as engine:
        answer = engine.submit(embed(text(1)))
        await answer.over.wait()
        assert trio.current_time() == 3
        engine.inject(Faults())
        answer = engine.submit(embed(text(1)))
        engine.stall(5.0)
        await answer.over.wait()
        assert trio.current_time() == 8


@pytest.mark.parametrize("by_itself", [True, False])
async def test_a_crash_fails_every_request_and_ends_the_embedder(by_itself: bool, autojump_clock: MockClock) -> None:
    engine = simulated(faults=Faults(crash_after_s=0.5 if by_itself else None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, EngineDied, engine.run)
        answers = [engine.submit(embed(text(1))) for _ in range(2)]
        await trio.sleep(0.25)
        if not by_itself:
            engine.crash()
        await engine.wait_lost()
        assert trio.current_time() == (0.5 if by_itself else 0.25)
        for answer in answers:
            with pytest.raises(EngineLost):
                await answer.result()
        await engine.wait_released("any")
        with pytest.raises(EngineLost):
            engine.submit(embed(text(1)))
        with pytest.raises(EngineLost):
            await engine.load()


# Vectors --------------------------------------------------------------------------------------


def test_a_vector_depends_on_the_ids_their_division_and_the_seed() -> None:
    vectors = [
        vector(text(1, 2), VECTORS),
        vector(text(1, 3), VECTORS),
        vector(text(1, 2), VECTORS, seed=1),
        vector(text(1, 2, second_at=1), VECTORS),
    ]
    assert vector(text(1, 2), VECTORS) == vectors[0]
    assert len({each.tobytes() for each in vectors}) == 4


def test_a_score_is_a_number_from_0_to_1() -> None:
    scores = [vector(text(1, number, second_at=1), SCORES) for number in range(100)]
    assert all(len(score) == 1 and 0 <= score[0] <= 1 for score in scores)
    assert max(scores)[0] - min(scores)[0] > 0.5
