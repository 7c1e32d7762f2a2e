"""Encoder: each item is encoded once, in batches, for as long as anybody wants it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakSet

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.encoder import encoder
from actors.engines.encoding import queue as encode_queue
from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.limits import EncoderLimits, EncoderObserver
from actors.engines.encoding.queue import EncodeQueue, EncodeQueueStatistics
from actors.engines.simulated.spec import Faults
from protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDied,
    EngineRefused,
    EngineStuck,
    InternalError,
    RequestError,
)
from protocol.messages.engine import EngineLoad
from protocol.messages.media import EmbeddingBatch, EmbeddingOutcome, MediaForm, MediaItem
from protocol.tensors import Dtype, Tensor
from protocol.trace import Trace
from supervisor.engines.work import encode_inbox
from tests.rig.encoders import (
    EncoderByHand,
    EncoderRig,
    embedded,
    encode,
    encoder_rig,
    image,
    noting_encoder,
    running_encoder,
    video,
)
from tests.rig.tasks import expect_error
from tests.rig.watched_memory import Watched, uncollected, watched

NOTHING = EncodeQueueStatistics(waiting=0, waiting_tokens=0, computing=0)


def alike(one: MediaItem, other: MediaItem) -> bool:
    """Whether two items are the same, with the same bytes."""
    return one == evolve(other, data=one.data) and bytes(one.data.data) == bytes(other.data.data)


# Results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", [image(), video()], ids=["image", "video"])
async def test_an_item_comes_back_with_its_embeddings(item: MediaItem, autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig:
        result = await rig.ask(item)
        assert not result.cached
        assert alike(result.item, await embedded(item))
        assert rig.observer.requests == [f"{item.modality} encoded"]
        assert rig.observer.batches == [(1, "ended", 1.0)]


async def test_each_item_of_a_batch_owns_its_embeddings(autojump_clock: MockClock) -> None:
    """One that is kept would otherwise keep the whole batch, in memory that is the engine's."""
    async with encoder_rig(engine := EncoderByHand()) as rig, trio.open_nursery() as nursery:
        for name in "ab":
            nursery.start_soon(rig.ask, name)
            await wait_all_tasks_blocked()
        await trio.sleep(1)
        shared = memoryview(bytes(range(128)))
        parts = (Tensor(Dtype.BFLOAT16, (4, 8), shared[start : start + 64]) for start in (0, 64))
        engine.end(EmbeddingBatch(tuple(EmbeddingOutcome(part) for part in parts)))
        await trio.sleep(1)
        one, other = (rig.results[name].item.data.data for name in "ab")
        assert (bytes(one), bytes(other)) == (bytes(shared[:64]), bytes(shared[64:]))
        assert len({id(view.obj) for view in (one, other, shared)}) == 3
        assert one.readonly


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (evolve(image(), tokens=5), "says that it has 5 tokens, and its grid of 1 x 4 x 4 patches makes 4"),
        (evolve(image(), form=MediaForm.EMBEDDINGS), "takes pixels, not embeddings"),
        (evolve(image(), digest="x" * 64), "digest"),
        (image().place, "takes pixels, not places"),
    ],
)
async def test_an_item_that_cannot_be_encoded_reaches_no_engine(
    item: MediaItem, reason: str, autojump_clock: MockClock
) -> None:
    async with encoder_rig() as rig:
        with pytest.raises(BadRequest, match=reason):
            await rig.ask(item)
        assert rig.engine.batches == []
        assert rig.observer.requests == ["image invalid_request"]
        await rig.ask("b")


FINE = Tensor(Dtype.BFLOAT16, (4, 8), memoryview(bytes(64)))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (evolve(FINE, shape=(3, 8)), "made 3 x 8 for an item of 4 tokens, 8 elements each"),
        (evolve(FINE, shape=(4, 7)), "made 4 x 7 for an item of 4 tokens, 8 elements each"),
        (evolve(FINE, shape=(32,)), "made 32 for an item of 4 tokens"),
        (evolve(FINE, dtype=Dtype.FLOAT16), "made float16, where its info has bfloat16"),
        (evolve(FINE, data=memoryview(bytes(3))), "made 3 bytes, where the shape needs 64"),
    ],
)
async def test_what_is_not_the_embeddings_of_an_item_fails_it_alone_with_both_numbers(
    tensor: Tensor, reason: str, autojump_clock: MockClock
) -> None:
    async with encoder_rig(engine := EncoderByHand()) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, InternalError, rig.ask, "a")
        await wait_all_tasks_blocked()
        nursery.start_soon(rig.ask, "b")
        await trio.sleep(1)
        engine.end(EmbeddingBatch((EmbeddingOutcome(tensor), EmbeddingOutcome(FINE))))
        await trio.sleep(1)
        assert rig.results.keys() == {"b"}
        assert len(rig.cache) == 1
        nursery.start_soon(failing, rig, "c", reason)
        await trio.sleep(1)
        engine.end(EmbeddingBatch((EmbeddingOutcome(tensor),)))


async def failing(rig: EncoderRig, name: str, reason: str, error: type[RequestError] = InternalError) -> None:
    with pytest.raises(error, match=reason):
        await rig.ask(name)


async def test_an_item_that_the_engine_refuses_fails_alone(autojump_clock: MockClock) -> None:
    async with encoder_rig(engine := EncoderByHand()) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(failing, rig, "a", "it is ugly", EngineRefused)
        await wait_all_tasks_blocked()
        nursery.start_soon(rig.ask, "b")
        await trio.sleep(1)
        engine.end(
            EmbeddingBatch((EmbeddingOutcome(code=EngineRefused.code, detail="it is ugly"), EmbeddingOutcome(FINE)))
        )
        await trio.sleep(1)
        assert sorted(rig.observer.requests) == ["image encoded", "image engine_refused"]
        assert len(rig.cache) == 1


# Batches ------------------------------------------------------------------------------------


async def arrive(rig: EncoderRig, *arrivals: tuple[float, str]) -> None:
    """Ask for items by name, each at its time."""
    async with trio.open_nursery() as nursery:
        for at, name in arrivals:
            await trio.sleep_until(at)
            nursery.start_soon(rig.ask, name)


async def test_the_first_item_waits_for_others_no_longer_than_stated(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_wait_s=0.5) as rig:
        await arrive(rig, (0, "a"), (0.25, "b"), (0.375, "c"), (0.625, "d"))
        assert rig.names == ["abc", "d"]
        assert rig.times == {"a": 1.5, "b": 1.5, "c": 1.5, "d": 2.5}
        assert rig.observer.waits == [0.5, 0.25, 0.125, 0.875]


async def test_a_full_batch_does_not_wait(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_wait_s=50, batch_max=2) as rig:
        await arrive(rig, (0, "a"), (1, "b"))
        assert rig.times == {"a": 2, "b": 2}


async def test_a_batch_of_enough_tokens_does_not_wait_and_takes_no_more(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_wait_s=0.5, batch_tokens_max=9) as rig:
        await arrive(rig, (0, "a"), (0, "b"), (0, "c"))
        assert rig.names == ["ab", "c"]
        assert rig.times == {"a": 1, "b": 1, "c": 2}


async def test_a_batch_has_no_more_bytes_than_can_be_sent(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_queue, "BATCH_BYTES_MAX", 2 * len(image().data.data))
    async with encoder_rig() as rig:
        await arrive(rig, (0, "a"), (0, "b"), (0, "c"))
        assert rig.names == ["ab", "c"]


async def test_what_comes_while_the_engine_computes_is_its_next_batch(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_wait_s=0.5, batch_max=2) as rig:
        await arrive(rig, (0, "a"), (0.75, "b"), (1, "c"), (1.25, "d"))
        assert rig.names == ["a", "bc", "d"]
        assert rig.times == {"a": 1.5, "b": 2.5, "c": 2.5, "d": 3.5}


async def test_an_item_with_which_an_encoder_was_lost_is_a_batch_alone(autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig, trio.open_nursery() as nursery:
        for name, alone in (("a", False), ("b", True), ("c", False), ("d", False), ("c", True)):
            nursery.start_soon(partial(rig.ask, name, f"{name} {alone}", alone=alone))
            await wait_all_tasks_blocked()
        await trio.sleep(6)
        assert rig.names == ["a", "b", "c", "d"], "c is alone for whoever wants it"
        for name, alone in (("e", True), ("f", False), ("g", False)):
            nursery.start_soon(partial(rig.ask, name, alone=alone))
            await wait_all_tasks_blocked()
        await trio.sleep(6)
        assert rig.names[4:] == ["e", "fg"]


# One item once ------------------------------------------------------------------------------


async def test_equal_items_in_flight_are_encoded_once(autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig, trio.open_nursery() as nursery:
        for at, request_id in ((0, "waits"), (0.25, "waits too"), (0.75, "is being encoded")):
            await trio.sleep_until(at)
            nursery.start_soon(rig.ask, "a", request_id)
            await wait_all_tasks_blocked()
        await trio.sleep(1)
        assert rig.names == ["a"]
        assert rig.times == dict.fromkeys(("waits", "waits too", "is being encoded"), 1.5)
        assert not any(result.cached for result in rig.results.values())
        assert sorted(rig.observer.requests) == ["image encoded", "image shared", "image shared"]


async def test_an_item_that_was_encoded_is_answered_at_once_whatever_the_engine_does(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_max=1, batch_wait_s=0) as rig, trio.open_nursery() as nursery:
        first = await rig.ask("a")
        for name in "bc":
            nursery.start_soon(rig.ask, name)
            await wait_all_tasks_blocked()
        await trio.sleep(0.25)
        again = await rig.ask("a", "again")
        assert trio.current_time() == 1.25
        assert again == evolve(first, cached=True)
        await trio.sleep(2)
        assert rig.names == ["a", "b", "c"]
        assert rig.observer.requests[:2] == ["image encoded", "image cached"]


@pytest.mark.parametrize("delay_s", [0.25, 1.25, 5])
async def test_another_item_with_the_same_digest_is_refused_with_both_numbers(
    delay_s: float, autojump_clock: MockClock
) -> None:
    """It waits, is being encoded, or has been."""
    other = evolve(image("b", 2, 4), digest=image("a").digest)
    async with encoder_rig() as rig, trio.open_nursery() as nursery:
        nursery.start_soon(rig.ask, "a")
        await trio.sleep(delay_s)
        with pytest.raises(BadRequest, match=r"the grid of one is \(1, 2, 4\), of the other \(1, 4, 4\)"):
            await rig.ask(other)
        await trio.sleep(5)
        assert alike(rig.results["a"].item, await embedded(image("a")))


async def test_an_item_that_another_owner_wants_does_not_wait_for_the_first_ones_turn(
    autojump_clock: MockClock,
) -> None:
    async with encoder_rig(batch_max=1, batch_wait_s=0) as rig, trio.open_nursery() as nursery:
        asked = [*((name, "greedy", name) for name in "abcd"), ("d", "other", "other's d")]
        for name, owner, request_id in asked:
            nursery.start_soon(partial(rig.ask, name, request_id, owner=owner))
            await wait_all_tasks_blocked()
        await trio.sleep(5)
        assert rig.names == ["a", "b", "d", "c"]
        assert rig.times["d"] == rig.times["other's d"] == 3


async def test_an_urgent_asker_takes_the_item_along_for_all(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_max=1, batch_wait_s=0) as rig, trio.open_nursery() as nursery:
        for name, request_id, priority in (("a", "a", 0), ("b", "b", 0), ("c", "c", 0), ("c", "urgent", 1)):
            nursery.start_soon(partial(rig.ask, name, request_id, priority=priority))
            await wait_all_tasks_blocked()
        await trio.sleep(5)
        assert rig.names == ["a", "c", "b"]
        assert rig.times["c"] == rig.times["urgent"] == 2


# Leaving ------------------------------------------------------------------------------------


@asynccontextmanager
async def asking(rig: EncoderRig, *asked: tuple[str, str]) -> AsyncIterator[dict[str, trio.CancelScope]]:
    """Ask for items, a name and a request id each; the body may cancel each by its id."""
    scopes = {request_id: trio.CancelScope() for _, request_id in asked}

    async def ask(name: str, request_id: str) -> None:
        with scopes[request_id]:
            await rig.ask(name, request_id)

    async with trio.open_nursery() as nursery:
        for name, request_id in asked:
            nursery.start_soon(ask, name, request_id)
            await wait_all_tasks_blocked()
        yield scopes


async def test_an_item_whose_asker_leaves_before_its_batch_is_not_encoded(autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig:
        async with asking(rig, ("a", "1"), ("b", "2")) as scopes:
            await trio.sleep(0.25)
            scopes["1"].cancel()
        assert rig.names == ["b"]
        assert rig.observer.requests == ["image left", "image encoded"]


async def test_the_work_ends_only_when_the_last_who_wants_it_leaves(autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig:
        async with asking(rig, ("a", "1"), ("a", "2"), ("a", "3")) as scopes:
            await trio.sleep(0.25)  # it waits
            scopes["1"].cancel()
            await trio.sleep(0.5)  # it is being encoded
            scopes["2"].cancel()
        assert rig.names == ["a"]
        assert rig.engine.aborts == []
        assert rig.results.keys() == {"3"}
        async with asking(rig, ("b", "4"), ("b", "5")) as scopes:
            await trio.sleep(0.75)
            for scope in scopes.values():
                scope.cancel()
            await wait_all_tasks_blocked()
            assert len(rig.engine.aborts) == 1
        assert not (await rig.ask("b")).cached


async def test_a_batch_is_aborted_when_nobody_wants_any_of_its_items(autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig:
        async with asking(rig, ("a", "1"), ("b", "2")) as scopes:
            await trio.sleep(0.75)
            scopes["1"].cancel()
            await wait_all_tasks_blocked()
            assert rig.engine.aborts == []
            await trio.sleep(0.25)
            scopes["2"].cancel()
            await wait_all_tasks_blocked()
            assert len(rig.engine.aborts) == 1
        await trio.sleep(1)
        assert rig.observer.batches == [(2, "left", 1.0)]
        assert rig.observer.aborts == [0.5], "an engine cannot stop in the middle of a batch"
        assert len(rig.cache) == 0


async def test_an_item_whose_batch_goes_on_is_kept_although_its_own_asker_has_left(autojump_clock: MockClock) -> None:
    async with encoder_rig() as rig:
        async with asking(rig, ("a", "1"), ("b", "2")) as scopes:
            await trio.sleep(0.75)
            scopes["1"].cancel()
        assert (await rig.ask("a")).cached


async def test_a_slot_is_free_when_the_engine_holds_nothing_of_its_item(autojump_clock: MockClock) -> None:
    async with encoder_rig(slots=1) as rig:
        async with asking(rig, ("a", "1")) as scopes:
            await trio.sleep(0.25)
            scopes["1"].cancel()  # it waits, and nothing is in the engine
        async with asking(rig, ("b", "2")) as scopes:
            await trio.sleep(0.75)
            scopes["2"].cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.ask, "c")
            await wait_all_tasks_blocked()
            assert rig.inbox.waiting == (1, 0), "the engine still encodes b"
            await trio.sleep_until(1.75)
            await wait_all_tasks_blocked()
            assert rig.inbox.waiting == (0, 0)


@pytest.mark.parametrize("tenths", range(0, 30, 3))
async def test_leaving_at_any_moment_leaves_nothing_behind(tenths: int, autojump_clock: MockClock) -> None:
    engine, limits = noting_encoder(), EncoderLimits(batch_wait_s=0.5, batch_max=2)
    works = EncodeQueue(engine, limits, EmbeddingCache(10_000), EncoderObserver())

    async def want(name: str) -> None:
        with works.join(encode(name)) as job:
            await job.embeddings(10)

    async with running_encoder(engine), trio.open_nursery() as nursery:
        nursery.start_soon(works.run)
        with trio.move_on_after(tenths / 10):
            async with trio.open_nursery() as askers:
                for name in "aabcb":
                    askers.start_soon(want, name)
        await trio.sleep(2)
        assert works.statistics() == NOTHING
        assert await engine.load() == EngineLoad(0, 0, 0)
        nursery.cancel_scope.cancel()


# Deadlines, and engines that fail ------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.2, 1.0, 5.0], ids=["left before its batch", "left in it", "answered"])
async def test_the_tensors_of_an_item_are_freed_with_its_last_asker(after_s: float, autojump_clock: MockClock) -> None:
    alive: WeakSet[Watched] = WeakSet()
    with uncollected():
        async with encoder_rig(cache_bytes_max=0) as rig:
            items = [evolve(image(name), data=watched(image(name).data, alive)) for name in "ab"]
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = trio.current_time() + after_s
                while items:
                    nursery.start_soon(rig.ask, items.pop())
            rig.results.clear()
            await trio.sleep(5)
            assert len(alive) == 0


async def test_the_items_that_wait_and_those_that_are_computed_are_reported(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_max=2) as rig, trio.open_nursery() as nursery:
        for name in "abcdc":
            nursery.start_soon(rig.ask, name, f"{name} {len(nursery.child_tasks)}")
            await wait_all_tasks_blocked()
        assert rig.observer.queue == (2, 2)
        await trio.sleep(1.5)
        assert rig.observer.queue == (0, 2)
        nursery.cancel_scope.cancel()
    assert rig.observer.queue == (0, 0)


async def test_an_item_waits_for_its_batch_no_longer_than_stated(autojump_clock: MockClock) -> None:
    async with encoder_rig(batch_max=1, batch_wait_s=0, waiting_s=2.5) as rig, trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(rig.ask, name)
            await wait_all_tasks_blocked()
        nursery.start_soon(failing, rig, "d", "was not free for this item within 2.5 s", DeadlineExceeded)
        await trio.sleep(5)
        assert rig.times == {"a": 1, "b": 2, "c": 3}, "one that is being encoded does not wait"
        assert rig.names == ["a", "b", "c"]


async def test_a_batch_that_takes_too_long_fails_and_the_next_is_served(autojump_clock: MockClock) -> None:
    engine = noting_encoder()
    async with encoder_rig(engine, batch_s=4, release_s=3) as rig, trio.open_nursery() as nursery:
        engine.inject(Faults(slow=6))
        for name in "ab":
            nursery.start_soon(failing, rig, name, "longer than 4 s for a batch of 2 items", DeadlineExceeded)
        await trio.sleep(0.75)
        engine.inject(Faults())
        nursery.start_soon(rig.ask, "c")
        await trio.sleep(8)
        assert rig.observer.batches == [(2, "deadline_exceeded", 4.0), (1, "ended", 1.0)]
        assert rig.times == {"c": 7.5}


async def test_an_engine_that_keeps_a_batch_is_stuck(autojump_clock: MockClock) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with encoder_rig(EncoderByHand(), batch_s=4, release_s=3) as rig, trio.open_nursery() as nursery:
            nursery.start_soon(expect_error, DeadlineExceeded, rig.ask, "a")
            await trio.sleep(1)
            nursery.start_soon(expect_error, RequestError, rig.ask, "b")
            await trio.sleep(60)
    assert caught.group_contains(EngineStuck, match="keeps a batch 3 s after its end")
    assert trio.current_time() == 7.5


async def test_an_engine_that_is_lost_fails_its_calls_and_its_actor(autojump_clock: MockClock) -> None:
    """Only those that were in its batch may be why: they are encoded alone from then on."""
    engine, failed = EncoderByHand(), dict[str, str]()
    address, inbox = encode_inbox(8)

    async def run() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await encoder(inbox, engine, 3, EncoderLimits(batch_max=2))
        assert caught.group_contains(EngineDied)

    async def ask(name: str) -> None:
        try:
            async with address.ask(encode(name, name), 0) as answer:
                await answer.result()
        except RequestError as error:
            failed[name] = error.code

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        for name in "abcd":
            nursery.start_soon(ask, name)
            await wait_all_tasks_blocked()
        await trio.sleep(1)
        engine.lost.set()  # before its answers fail
        await wait_all_tasks_blocked()
        assert failed == {"a": "engine_lost", "b": "engine_lost", "c": "actor_lost"}
        assert inbox.waiting == (1, 0), "it waits for the next life"
        nursery.cancel_scope.cancel()


async def test_a_call_whose_trace_is_sampled_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trace = Trace("0" * 31 + "1", "0" * 15 + "1", parent="0" * 15 + "2")
    async with encoder_rig() as rig:
        await rig.ask("a", "first", trace=trace)
        await rig.ask("b", "second")
    (record,) = [record for record in caplog.records if record.message == "encoding ended"]
    logged = {name: getattr(record, name) for name in ("request_id", "outcome", "duration_s")}
    assert logged == {"request_id": "first", "outcome": "ended", "duration_s": 1.5}
