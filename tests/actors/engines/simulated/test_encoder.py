"""The simulated encoder: the contract of every encoder, its exact times, its faults, and what it makes of pixels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.encoder import SimulatedEncoder, embed
from actors.engines.simulated.spec import EncodingCosts, Faults
from protocol.errors import AskerLeft, EngineDied, EngineLost
from protocol.messages.engine import EngineLoad
from protocol.messages.media import MediaInfo, MediaItem, Modality
from protocol.tensors import Dtype
from tests.contracts import encoder as contract
from tests.contracts.encoder import batch
from tests.rig.encoders import COSTS, MEDIA, image, running_encoder, video
from tests.rig.tasks import expect_error
from tests.system.simulator import simulate

PRICED = EncodingCosts(fixed_s=1.0, per_item_s=0.5, per_token_s=0.125)


def simulated(costs: EncodingCosts = COSTS, media: MediaInfo = MEDIA, **more: Any) -> SimulatedEncoder:
    return SimulatedEncoder(media, 8, random.Random(0), costs, **more)


def item(number: int, modality: Modality) -> MediaItem:
    return image(str(number)) if modality is Modality.IMAGE else video(str(number))


@pytest.mark.parametrize(
    "media",
    [
        MEDIA,
        evolve(MEDIA, video_token=None),
        evolve(MEDIA, image_token=None, dtype=Dtype.FLOAT32),
        evolve(MEDIA, dtype=Dtype.FLOAT16, width=3),
    ],
    ids=["both", "images", "videos", "float16"],
)
async def test_the_simulated_encoder_keeps_the_contract(media: MediaInfo, autojump_clock: MockClock) -> None:
    await contract.check_encoder(lambda: running_encoder(simulated(media=media)), item)


@pytest.mark.parametrize("seed", range(3))
def test_the_contract_holds_in_any_order_of_tasks(seed: int) -> None:
    async def scenario(_: random.Random) -> None:
        await contract.check_encoder(lambda: running_encoder(simulated(EncodingCosts(fixed_s=0.001))), item)

    simulate(scenario, seed)


# Time ---------------------------------------------------------------------------------------


async def test_a_batch_costs_the_sum_of_its_prices_and_the_next_begins_when_it_ends(autojump_clock: MockClock) -> None:
    async with running_encoder(simulated(PRICED)) as engine:
        first, second = engine.submit(batch(image("a"), image("b"))), engine.submit(batch(video("c")))
        await first.over.wait()
        assert trio.current_time() == 1 + 2 * 0.5 + 8 * 0.125
        await second.over.wait()
        assert trio.current_time() == 3 + 1 + 0.5 + 8 * 0.125


async def test_a_batch_that_is_being_computed_is_released_at_its_end_and_one_that_waits_at_once(
    autojump_clock: MockClock,
) -> None:
    async with running_encoder(simulated()) as engine:
        batches = [batch(image("a"), image("b")), batch(image("c"))]
        first, second = map(engine.submit, batches)
        await trio.sleep(0.25)
        assert await engine.load() == EngineLoad(2, 1, 0)
        for each in batches:
            engine.abort(each.id)
        assert second.over.is_set()
        assert await engine.load() == EngineLoad(2, 0, 0)
        with pytest.raises(AskerLeft):
            await first.result()
        assert trio.current_time() == 1


# Faults -------------------------------------------------------------------------------------


async def test_a_stuck_encoder_keeps_what_is_aborted_until_it_is_well(autojump_clock: MockClock) -> None:
    async with running_encoder(simulated(faults=Faults(stuck=1.0))) as engine:
        batches = [batch(image("a")), batch(image("b"))]
        answers = [engine.submit(each) for each in batches]
        await trio.sleep(0.5)
        for each in batches:
            engine.abort(each.id)
        await trio.sleep(5)
        assert not any(answer.over.is_set() for answer in answers)
        engine.inject(Faults())
        assert all(answer.over.is_set() for answer in answers)
        assert await engine.load() == EngineLoad(0, 0, 0)


@pytest.mark.parametrize("by_itself", [True, False])
async def test_a_crash_fails_every_batch_and_ends_the_encoder(by_itself: bool, autojump_clock: MockClock) -> None:
    engine = simulated(faults=Faults(crash_after_s=0.5 if by_itself else None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, EngineDied, engine.run)
        answers = [engine.submit(batch(image())) for _ in range(2)]
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
            engine.submit(batch(image()))
        with pytest.raises(EngineLost):
            await engine.load()


# Embeddings -----------------------------------------------------------------------------------


async def test_embeddings_depend_on_pixels_grid_and_modality_and_not_on_the_digest() -> None:
    async def made(item: MediaItem) -> bytes:
        return bytes((await embed(item, MEDIA)).data)

    same = await made(image("a"))
    assert same == await made(evolve(image("a"), digest="0" * 64))
    changed = bytearray(image("a").data.data)
    changed[-1] ^= 1
    others = [
        evolve(image("a"), data=evolve(image("a").data, data=memoryview(changed))),
        evolve(image("a"), grid=(1, 2, 8)),
        evolve(image("a"), modality=Modality.VIDEO),
    ]
    assert len({same, *[await made(other) for other in others]}) == 4
