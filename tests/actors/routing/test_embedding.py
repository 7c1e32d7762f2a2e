"""The parts of a request, over embedders with scripted answers, in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from actors.routing.embedding import PARTS_AT_ONCE, Embedding, EmbedWork
from actors.routing.route import FailoverLimits
from protocol.errors import ActorLost, BadRequest, EngineLost, InternalError, LinkLost, NotReady, RequestError
from protocol.messages.embedding import Embed, TextItem, Vectors
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds
from tests.rig.whole_workers import NotingRouting, WholeWorkerByScript, WholeWorkers


def part(*numbers: int) -> tuple[TextItem, ...]:
    return tuple(TextItem(TokenIds.of([number])) for number in numbers)


def vectors(*numbers: int, width: int = 2) -> Vectors:
    """Return vectors that each have one number in all places."""
    data = array("f", [number for number in numbers for _ in range(width)]).tobytes()
    return Vectors(Tensor(Dtype.FLOAT32, (len(numbers), width), memoryview(data)))


def of(request: Embed) -> Vectors:
    return vectors(*(item.tokens[0] for item in request.items), width=request.dimensions or 2)


def scripted(name: str, errors: Sequence[RequestError] = (), **changes: Any) -> WholeWorkerByScript[Embed, Vectors]:
    return WholeWorkerByScript(name, list(errors), of, **changes)


@asynccontextmanager
async def embedding(*embedders: WholeWorkerByScript[Embed, Vectors]) -> AsyncIterator[tuple[Embedding, NotingRouting]]:
    numbers, observer = count(), NotingRouting()
    async with trio.open_nursery() as stage:
        pool = WholeWorkers(embedders, stage)
        yield Embedding(pool, FailoverLimits(), lambda: f"{next(numbers):032x}", observer), observer


async def test_parts_are_computed_at_the_same_time_and_keep_their_order(autojump_clock: MockClock) -> None:
    first, second = scripted("a", takes_s=2), scripted("b")
    async with embedding(first, second) as (leg, observer):
        work = EmbedWork("r", (part(1, 2), part(3)), 4, priority=5, owner="key")
        assert await leg.vectors(work) == (vectors(1, 2, width=4), vectors(3, width=4))
        assert trio.current_time() == 2
    assert sorted(observer.ended) == [("a", "ended"), ("b", "ended")]
    (asked,) = first.asked
    assert (asked.dimensions, asked.priority, asked.owner) == (4, 5, "key")
    assert asked.id != second.asked[0].id


async def test_a_part_goes_to_the_least_busy_embedder(autojump_clock: MockClock) -> None:
    small, large, full = scripted("a", slots=2, busy=1), scripted("b", slots=8, busy=2), scripted("c", slots=1, busy=1)
    async with embedding(full, small, large) as (leg, _):
        await leg.vectors(EmbedWork("r", (part(1), part(2))))
    assert [len(each.asked) for each in (small, large, full)] == [0, 2, 0]


async def test_only_some_parts_of_one_request_are_asked_for_at_once(autojump_clock: MockClock) -> None:
    only = scripted("a", slots=100)
    async with embedding(only) as (leg, _):
        numbers = range(2 * PARTS_AT_ONCE + 1)
        assert await leg.vectors(EmbedWork("r", tuple(map(part, numbers)))) == tuple(map(vectors, numbers))
    assert trio.current_time() == 3


@pytest.mark.parametrize("error", [EngineLost, ActorLost, LinkLost, NotReady])
async def test_a_part_goes_on_elsewhere_when_its_embedder_is_lost(
    error: type[RequestError], autojump_clock: MockClock
) -> None:
    lost, other = scripted("a", [error("gone")]), scripted("b", busy=1)
    async with embedding(lost, other) as (leg, observer):
        assert await leg.vectors(EmbedWork("r", (part(1),))) == (vectors(1),)
    assert observer.ended == [("a", error.code), ("b", "ended")]


async def test_a_part_that_crashes_embedders_fails(autojump_clock: MockClock) -> None:
    embedders = [scripted(name, [EngineLost("it died")] * 9) for name in ("a", "b", "c")]
    async with embedding(*embedders) as (leg, _):
        with pytest.raises(EngineLost):
            await leg.vectors(EmbedWork("r", (part(1),)))
    assert sum(len(each.asked) for each in embedders) == 2


async def test_the_failure_of_one_part_ends_the_others_at_once(autojump_clock: MockClock) -> None:
    slow, quick = scripted("a", takes_s=60), scripted("b", [BadRequest("it is wrong")])
    async with embedding(slow, quick) as (leg, _):
        with pytest.raises(BadRequest, match="it is wrong"):
            await leg.vectors(EmbedWork("r", (part(1), part(2))))
        assert trio.current_time() == 1
        assert (slow.busy, quick.busy) == (0, 0)


async def test_leaving_ends_every_part(autojump_clock: MockClock) -> None:
    one = scripted("a", slots=100, takes_s=60)
    async with embedding(one) as (leg, observer):
        with trio.move_on_after(2):
            await leg.vectors(EmbedWork("r", tuple(map(part, range(20)))))
        assert one.busy == 0
    assert observer.ended == [("a", "left")] * PARTS_AT_ONCE


async def test_without_an_embedder_a_request_waits_for_one_and_then_is_refused(autojump_clock: MockClock) -> None:
    async with embedding(scripted("a", up=False)) as (leg, _):
        with pytest.raises(NotReady, match="no engine of this model is up"):
            await leg.vectors(EmbedWork("r", (part(1),)))
        assert trio.current_time() == FailoverLimits().resume_s


@pytest.mark.parametrize("wrong", [vectors(1, 2), vectors(1, width=3)])
async def test_vectors_of_a_wrong_number_or_length_reach_no_client(wrong: Vectors, autojump_clock: MockClock) -> None:
    liar, honest = scripted("a"), scripted("b")
    liar.answer = lambda _: wrong
    async with embedding(liar, honest) as (leg, _):
        with pytest.raises(InternalError, match="returned"):
            await leg.vectors(EmbedWork("r", (part(1), part(2))))
