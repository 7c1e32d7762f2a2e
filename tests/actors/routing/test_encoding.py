"""The encode leg of a request, over encoders with scripted answers, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any
from weakref import WeakSet

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.encoding import EncodeWork, Encoding, rank
from actors.routing.route import FailoverLimits
from protocol.errors import ActorLost, BadRequest, EngineLost, LinkLost, NotReady, Overloaded, RequestError
from protocol.messages.media import Encode, Encoded, MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor
from protocol.trace import Trace
from tests.rig.spans import KeptSpans
from tests.rig.watched_memory import Watched, uncollected, watched
from tests.rig.whole_workers import NotingRouting, WholeWorkerByScript, WholeWorkers

EMBEDDED = Tensor(Dtype.FLOAT32, (1, 1), memoryview(b"abcd"))


def pixels(number: int) -> MediaItem:
    data = Tensor(Dtype.UINT8, (1, 1, 1, 3), memoryview(bytes((number, 0, 0))))
    return MediaItem(Modality.IMAGE, f"{number:064x}", (1, 2, 2), 1, MediaForm.PIXELS, data)


def embedded(item: MediaItem) -> MediaItem:
    return evolve(item, form=MediaForm.EMBEDDINGS, data=EMBEDDED)


def work(*numbers: int) -> EncodeWork:
    return EncodeWork("a" * 32, tuple(map(pixels, numbers)), priority=3, owner="key")


def scripted(
    name: str, errors: Sequence[RequestError] = (), slots: int = 4, **changes: Any
) -> WholeWorkerByScript[Encode, Encoded]:
    return WholeWorkerByScript(name, list(errors), lambda request: Encoded(embedded(request.item)), slots, **changes)


@asynccontextmanager
async def encoding(
    *encoders: WholeWorkerByScript[Encode, Encoded],
) -> AsyncIterator[tuple[Encoding, WholeWorkers[Encode, Encoded], NotingRouting]]:
    numbers, observer = count(), NotingRouting()
    async with trio.open_nursery() as stage:
        pool = WholeWorkers(encoders, stage)
        yield Encoding(pool, FailoverLimits(), lambda: f"{next(numbers):032x}", observer), pool, observer


def preferred(names: Sequence[str], number: int) -> str:
    return max(names, key=lambda name: rank(pixels(number).digest, name))


async def test_items_are_encoded_at_the_same_time_and_keep_their_order(autojump_clock: MockClock) -> None:
    async with encoding(scripted("a")) as (leg, _, observer):
        items = await leg.embeddings(work(1, 2, 3))
        assert items == tuple(embedded(pixels(number)) for number in (1, 2, 3))
        assert trio.current_time() == 1
        assert observer.ended == [("a", "ended")] * 3


async def test_an_item_without_pixels_is_not_asked_for(autojump_clock: MockClock) -> None:
    one = scripted("a")
    async with encoding(one) as (leg, _, _):
        own = embedded(pixels(1))
        assert await leg.embeddings(EncodeWork("a" * 32, (own, pixels(2)))) == (own, embedded(pixels(2)))
        assert [request.item for request in one.asked] == [pixels(2)]


async def test_equal_items_go_to_the_same_encoder_and_all_encoders_are_used(autojump_clock: MockClock) -> None:
    names = ["a", "b", "c"]
    encoders = [scripted(name) for name in names]
    async with encoding(*encoders) as (leg, _, _):
        for number in range(30):
            await leg.embeddings(work(number))
            await leg.embeddings(work(number))
        for each in encoders:
            asked = [int(request.item.digest, 16) for request in each.asked]
            assert asked == [
                number for number in range(30) for _ in range(2) if preferred(names, number) == each.full_name
            ]
            assert asked


async def test_an_item_goes_elsewhere_if_its_encoder_is_full_and_to_the_least_busy_if_all_are(
    autojump_clock: MockClock,
) -> None:
    first, second = (scripted(name, slots=2) for name in ("a", "b"))
    async with encoding(first, second) as (leg, _, _):
        by_name = {"a": first, "b": second}
        favourite = by_name[preferred(["a", "b"], 1)]
        other = by_name[({"a", "b"} - {favourite.full_name}).pop()]
        favourite.busy = 2
        await leg.embeddings(work(1))
        assert len(other.asked) == 1
        favourite.busy, other.busy = 3, 2
        await leg.embeddings(work(1))
        assert len(other.asked) == 2


@pytest.mark.parametrize("error", [EngineLost, ActorLost, LinkLost, Overloaded, NotReady])
async def test_an_item_goes_on_elsewhere_when_its_encoder_is_lost(
    error: type[RequestError], autojump_clock: MockClock
) -> None:
    encoders = {name: scripted(name) for name in ("a", "b")}
    async with encoding(*encoders.values()) as (leg, _, observer):
        name = preferred(["a", "b"], 1)
        encoders[name].errors.append(error("gone"))
        assert await leg.embeddings(work(1)) == (embedded(pixels(1)),)
        other = ({"a", "b"} - {name}).pop()
        assert observer.ended == [(name, error.code), (other, "ended")]
        (again,) = encoders[other].asked
        assert again.alone is (error is EngineLost)


async def test_an_item_waits_for_the_restart_of_the_only_encoder(autojump_clock: MockClock) -> None:
    only = scripted("a", [EngineLost("it died")])
    async with encoding(only) as (leg, pool, _):

        async def restart() -> None:
            await trio.sleep(0.5)
            only.up = False
            await trio.sleep(3)
            only.up = True
            pool.changed.unpark_all()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(restart)
            assert await leg.embeddings(work(1)) == (embedded(pixels(1)),)
        assert 4 < trio.current_time() < 5
        assert [request.alone for request in only.asked] == [False, True]


async def test_an_item_that_crashes_encoders_by_itself_fails(autojump_clock: MockClock) -> None:
    encoders = [scripted(name, [EngineLost("it died")] * 9) for name in ("a", "b", "c")]
    async with encoding(*encoders) as (leg, _, _):
        with pytest.raises(EngineLost):
            await leg.embeddings(work(1))
        assert sum(len(each.asked) for each in encoders) == 2


async def test_without_an_encoder_an_item_waits_for_one_and_then_is_refused(autojump_clock: MockClock) -> None:
    only = scripted("a", up=False)
    async with encoding(only) as (leg, _, _):
        with pytest.raises(NotReady, match="no encoder of this model is up"):
            await leg.embeddings(work(1))
        assert trio.current_time() == FailoverLimits().resume_s


async def test_the_failure_of_one_item_ends_the_others_at_once(autojump_clock: MockClock) -> None:
    slow, quick = scripted("a", takes_s=60), scripted("b", [BadRequest("it has no colours")])
    async with encoding(slow, quick) as (leg, _, observer):
        of_slow = next(number for number in count() if preferred(["a", "b"], number) == "a")
        of_quick = next(number for number in count() if preferred(["a", "b"], number) == "b")
        with pytest.raises(BadRequest, match="no colours"):
            await leg.embeddings(work(of_slow, of_quick))
        assert trio.current_time() == 1
        assert sorted(observer.ended) == [("a", "left"), ("b", "invalid_request")]
        assert (slow.busy, quick.busy) == (0, 0)


async def test_leaving_ends_every_item(autojump_clock: MockClock) -> None:
    one = scripted("a", takes_s=60)
    async with encoding(one) as (leg, _, observer):
        with trio.move_on_after(2):
            await leg.embeddings(work(1, 2, 3))
        assert one.busy == 0
        assert observer.ended == [("a", "left")] * 3


@pytest.mark.parametrize("fails", [False, True])
async def test_pixels_of_a_request_that_ended_are_freed(fails: bool, autojump_clock: MockClock) -> None:
    alive: WeakSet[Watched] = WeakSet()
    with uncollected():
        async with encoding(one := scripted("a", [BadRequest("no")] if fails else [])) as (leg, _, _):
            items = tuple(evolve(item, data=watched(item.data, alive)) for item in work(1, 2).items)
            # `suppress` itself makes a circle of a group that it splits, so none may come to it.
            with suppress(BadRequest), trio.move_on_after(5 if fails else 0.5):
                await leg.embeddings(EncodeWork("a" * 32, items))
            del items
            one.asked.clear()
            await wait_all_tasks_blocked()
            assert len(alive) == 0


async def test_each_attempt_at_an_encoder_is_a_span_and_the_encoders_is_below_it(autojump_clock: MockClock) -> None:
    only, spans, trace = scripted("a", [EngineLost("it died")]), KeptSpans(), Trace("a" * 32, "b" * 16, "c" * 16)
    async with encoding(only) as (leg, _, _):
        await evolve(leg, spans=spans).embeddings(evolve(work(1), trace=trace))
    assert [(span.name, span.error, span.trace.parent) for span in spans.all] == [
        ("encode", EngineLost.code, trace.span),
        ("encode", "", trace.span),
    ]
    asked = [request.trace for request in only.asked]
    assert [each and each.parent for each in asked] == [span.trace.span for span in spans.all]
