"""The simulated encoder: the contract of every encoder, its exact times, its faults, and what it makes of pixels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.encoder_port import Encoder
from actors.engines.simulated.costs import EncodingCosts
from actors.engines.simulated.encoder import WAITING_MAX, SimulatedEncoder, embed
from actors.engines.simulated.faults import Faults
from protocol.errors import AskerLeft, EngineDied, EngineLost, EngineRefused, Overloaded
from protocol.media import EncodedItem, MediaForm, MediaInfo, MediaItem, Modality
from protocol.messages import EngineLoad
from protocol.tensors import BYTES, Dtype
from tests.contracts import encoder as contract
from tests.contracts.encoder import batch, elements
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


async def test_no_more_batches_wait_than_stated(autojump_clock: MockClock) -> None:
    async with running_encoder(simulated()) as engine:
        engine.submit(batch(image()))
        await wait_all_tasks_blocked()
        for _ in range(WAITING_MAX):
            engine.submit(batch(image()))
        with pytest.raises(Overloaded, match=f"{WAITING_MAX} batches wait"):
            engine.submit(batch(image()))


# Faults -------------------------------------------------------------------------------------


async def test_a_slow_encoder_takes_a_multiple_of_its_time(autojump_clock: MockClock) -> None:
    async with running_encoder(simulated(faults=Faults(slow=3))) as engine:
        await engine.submit(batch(image())).over.wait()
        assert trio.current_time() == 3


async def test_a_stalled_encoder_ends_no_batch_until_it_goes_on(autojump_clock: MockClock) -> None:
    async with running_encoder(simulated(faults=Faults(stall=1.0, stall_s=4.0))) as engine:
        await engine.submit(batch(image())).over.wait()
        assert trio.current_time() == 5
        engine.inject(Faults())
        answer = engine.submit(batch(image()))
        engine.stall(10)
        await answer.over.wait()
        assert trio.current_time() == 15


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


async def test_an_encoder_may_refuse_items(autojump_clock: MockClock) -> None:
    async with running_encoder(simulated(faults=Faults(refuse=1.0))) as engine:
        ended = await engine.submit(batch(image())).result()
        assert ended is not None
        assert ended.outcomes == (EncodedItem(code=EngineRefused.code, detail="the encoder does not like it"),)


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


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
async def test_embeddings_are_numbers_of_a_common_size(dtype: Dtype) -> None:
    tensor = await embed(image("a", 16, 16), evolve(MEDIA, dtype=dtype, width=32))
    assert tensor.shape == (64, 32)
    assert len(tensor.data) == 64 * 32 * BYTES[dtype]
    values = elements(tensor)
    assert all(0.5 <= abs(value) <= 2 for value in values)
    assert len(set(values)) > 100
    assert min(values) < 0 < max(values)


def test_it_is_an_encoder() -> None:
    engine: Encoder = simulated()
    assert engine.info.media == evolve(MEDIA, form=MediaForm.EMBEDDINGS)
    assert (engine.info.kind, engine.info.running_max) == ("simulated", 8)
