"""The encode leg of a request, over encoders with scripted answers, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from weakref import WeakSet

import pytest
import trio
from attrs import Factory, define, evolve, field
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.calls import Answer
from actors.routing.encoding import EncodeWork, Encoding, rank
from actors.routing.load import Load
from actors.routing.ports import RoutingObserver
from actors.routing.route import FailoverLimits
from protocol.errors import ActorLost, BadRequest, EngineLost, LinkLost, NotReady, Overloaded, RequestError
from protocol.messages.media import Encode, Encoded, MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor
from tests.rig.watched_memory import Watched, uncollected, watched

EMBEDDED = Tensor(Dtype.FLOAT32, (1, 1), memoryview(b"abcd"))


def pixels(number: int) -> MediaItem:
    data = Tensor(Dtype.UINT8, (1, 1, 1, 3), memoryview(bytes((number, 0, 0))))
    return MediaItem(Modality.IMAGE, f"{number:064x}", (1, 2, 2), 1, MediaForm.PIXELS, data)


def embedded(item: MediaItem) -> MediaItem:
    return evolve(item, form=MediaForm.EMBEDDINGS, data=EMBEDDED)


def work(*numbers: int) -> EncodeWork:
    return EncodeWork("a" * 32, tuple(map(pixels, numbers)), priority=3, owner="key")


@define(eq=False)
class FakeEncoder:
    """An encoder that takes a second an item, and fails as often as its script says."""

    full_name: str
    errors: list[RequestError] = Factory(list)
    slots: int = 4
    takes_s: float = 1.0
    busy: int = 0
    up: bool = True
    asked: list[Encode] = Factory(list)
    changed: trio.lowlevel.ParkingLot = Factory(trio.lowlevel.ParkingLot)
    stage: trio.Nursery = field(init=False)

    @property
    def load(self) -> Load:
        return Load(self.full_name, self.busy, self.slots)

    @asynccontextmanager
    async def ask(self, request: Encode, credit: int) -> AsyncIterator[Answer[Encoded, Encoded]]:
        assert credit == 0
        answer: Answer[Encoded, Encoded] = Answer(0)
        self.busy += 1
        self.asked.append(request)
        scope = trio.CancelScope()
        self.stage.start_soon(self._answer, request, answer, scope)
        try:
            yield answer
        finally:
            scope.cancel()
            self.busy -= 1
            self.changed.unpark_all()

    async def _answer(self, request: Encode, answer: Answer[Encoded, Encoded], scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(self.takes_s)
            if self.errors:
                answer.fail(self.errors.pop(0))
            else:
                answer.end(Encoded(embedded(request.item)))


@define(eq=False)
class FakePool:
    members: Sequence[FakeEncoder]
    changed: trio.lowlevel.ParkingLot = Factory(trio.lowlevel.ParkingLot)

    def encoders(self) -> list[FakeEncoder]:
        return [each for each in self.members if each.up]

    async def wait_changed(self) -> None:
        await self.changed.park()


@define(eq=False)
class Observer(RoutingObserver):
    ended: list[tuple[str, str]] = field(factory=list)

    def call_ended(self, worker: str, outcome: str) -> None:
        self.ended.append((worker, outcome))


@asynccontextmanager
async def encoding(*encoders: FakeEncoder) -> AsyncIterator[tuple[Encoding, FakePool, Observer]]:
    numbers, pool, observer = count(), FakePool(encoders), Observer()
    async with trio.open_nursery() as stage:
        for each in encoders:
            each.changed, each.stage = pool.changed, stage
        yield Encoding(pool, FailoverLimits(), lambda: f"{next(numbers):032x}", observer), pool, observer


def preferred(names: Sequence[str], number: int) -> str:
    return max(names, key=lambda name: rank(pixels(number).digest, name))


async def test_items_are_encoded_at_the_same_time_and_keep_their_order(autojump_clock: MockClock) -> None:
    async with encoding(FakeEncoder("a")) as (leg, _, observer):
        items = await leg.embeddings(work(1, 2, 3))
        assert items == tuple(embedded(pixels(number)) for number in (1, 2, 3))
        assert trio.current_time() == 1
        assert observer.ended == [("a", "ended")] * 3


async def test_an_item_without_pixels_is_not_asked_for(autojump_clock: MockClock) -> None:
    one = FakeEncoder("a")
    async with encoding(one) as (leg, _, _):
        own = embedded(pixels(1))
        assert await leg.embeddings(EncodeWork("a" * 32, (own, pixels(2)))) == (own, embedded(pixels(2)))
        assert [request.item for request in one.asked] == [pixels(2)]


async def test_equal_items_go_to_the_same_encoder_and_all_encoders_are_used(autojump_clock: MockClock) -> None:
    names = ["a", "b", "c"]
    encoders = [FakeEncoder(name) for name in names]
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
    first, second = (FakeEncoder(name, slots=2) for name in ("a", "b"))
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
    encoders = {name: FakeEncoder(name) for name in ("a", "b")}
    async with encoding(*encoders.values()) as (leg, _, observer):
        name = preferred(["a", "b"], 1)
        encoders[name].errors.append(error("gone"))
        assert await leg.embeddings(work(1)) == (embedded(pixels(1)),)
        other = ({"a", "b"} - {name}).pop()
        assert observer.ended == [(name, error.code), (other, "ended")]
        (again,) = encoders[other].asked
        assert again.alone is (error is EngineLost)


async def test_an_item_waits_for_the_restart_of_the_only_encoder(autojump_clock: MockClock) -> None:
    only = FakeEncoder("a", [EngineLost("it died")])
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
    encoders = [FakeEncoder(name, [EngineLost("it died")] * 9) for name in ("a", "b", "c")]
    async with encoding(*encoders) as (leg, _, _):
        with pytest.raises(EngineLost):
            await leg.embeddings(work(1))
        assert sum(len(each.asked) for each in encoders) == 2


async def test_without_an_encoder_an_item_waits_for_one_and_then_is_refused(autojump_clock: MockClock) -> None:
    only = FakeEncoder("a", up=False)
    async with encoding(only) as (leg, _, _):
        with pytest.raises(NotReady, match="no encoder of this model is up"):
            await leg.embeddings(work(1))
        assert trio.current_time() == FailoverLimits().resume_s


async def test_the_failure_of_one_item_ends_the_others_at_once(autojump_clock: MockClock) -> None:
    slow, quick = FakeEncoder("a", takes_s=60), FakeEncoder("b", [BadRequest("it has no colours")])
    async with encoding(slow, quick) as (leg, _, observer):
        of_slow = next(number for number in count() if preferred(["a", "b"], number) == "a")
        of_quick = next(number for number in count() if preferred(["a", "b"], number) == "b")
        with pytest.raises(BadRequest, match="no colours"):
            await leg.embeddings(work(of_slow, of_quick))
        assert trio.current_time() == 1
        assert sorted(observer.ended) == [("a", "left"), ("b", "invalid_request")]
        assert (slow.busy, quick.busy) == (0, 0)


async def test_leaving_ends_every_item(autojump_clock: MockClock) -> None:
    one = FakeEncoder("a", takes_s=60)
    async with encoding(one) as (leg, _, observer):
        with trio.move_on_after(2):
            await leg.embeddings(work(1, 2, 3))
        assert one.busy == 0
        assert observer.ended == [("a", "left")] * 3


@pytest.mark.parametrize("fails", [False, True])
async def test_pixels_of_a_request_that_ended_are_freed(fails: bool, autojump_clock: MockClock) -> None:
    alive: WeakSet[Watched] = WeakSet()
    with uncollected():
        async with encoding(one := FakeEncoder("a", [BadRequest("no")] if fails else [])) as (leg, _, _):
            items = tuple(evolve(item, data=watched(item.data, alive)) for item in work(1, 2).items)
            # `suppress` itself makes a circle of a group that it splits, so none may come to it.
            with suppress(BadRequest), trio.move_on_after(5 if fails else 0.5):
                await leg.embeddings(EncodeWork("a" * 32, items))
            del items
            one.asked.clear()
            await wait_all_tasks_blocked()
            assert len(alive) == 0
