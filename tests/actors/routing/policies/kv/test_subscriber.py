"""The prefix subscriber: an index that heals, whatever workers send, repeat, lose or claim."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock

from actors.engines.blocks.block_log import BlockLog, BlockReader
from actors.engines.simulated.spec import SimulatedSpec
from actors.kit.calls import Answer
from actors.routing.policies.kv.index import BLOCKS_MAX, PrefixIndex
from actors.routing.policies.kv.subscriber import (
    CREDIT,
    FORGET_S,
    PrefixSubscriber,
)
from protocol.errors import LinkLost, NotReady
from protocol.messages.engine import Done, EngineInfo
from protocol.messages.kind import Message
from protocol.messages.kv_events import REPLY_HASHES_MAX, BlockChange, BlockEvent, BlockEvents, WatchBlocks

STORED, REMOVED, CLEARED = BlockChange.STORED, BlockChange.REMOVED, BlockChange.CLEARED
Spoil = Callable[[BlockEvents], Iterable[BlockEvents]]


@define(eq=False)
class FakeWorker:
    """A worker that tells of a log, through something that may spoil what it says."""

    full_name: str
    log: BlockLog = field(factory=lambda: BlockLog("first life"))
    spoil: Spoil = field(default=lambda events: [events])
    asked: list[WatchBlocks] = field(factory=list)
    down: bool = False
    info: EngineInfo | None = None
    watching: int = 0
    pause_s: float = 0.05
    left: Callable[[], None] = lambda: None  # called when a stream ends
    stage: trio.Nursery = field(init=False)

    @asynccontextmanager
    async def watch(self, request: Message, credit: int) -> AsyncIterator[Answer[Message, Message]]:
        assert isinstance(request, WatchBlocks)
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        if self.down:
            raise NotReady("down")
        answer: Answer[Message, Message] = Answer(credit)
        self.watching += 1
        scope = trio.CancelScope()
        self.stage.start_soon(self._send, BlockReader(self.log, request.life, request.since), answer, scope)
        try:
            yield answer
        finally:
            scope.cancel()
            self.watching -= 1
            self.left()

    async def _send(self, reader: BlockReader, answer: Answer[Message, Message], scope: trio.CancelScope) -> None:
        with scope:
            await self._send_until_left(reader, answer)

    async def _send_until_left(self, reader: BlockReader, answer: Answer[Message, Message]) -> None:
        while answer.credit > 0:
            if self.down:
                answer.fail(LinkLost("gone"))
                return
            if (events := reader.read(answer.credit)) is None:
                await trio.sleep(self.pause_s)
                continue
            for each in self.spoil(events):
                if answer.credit > 0:
                    answer.put(each)
        answer.end(Done())


@define(eq=False)
class FakeMembers:
    """A pool whose workers come and go."""

    all: list[FakeWorker]
    unaware: bool = False  # that workers are down
    changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def watchable(self) -> list[FakeWorker]:
        return [worker for worker in self.all if self.unaware or not worker.down]

    async def wait_members_changed(self) -> None:
        await self.changed.park()

    def change(self) -> None:
        self.changed.unpark_all()


@asynccontextmanager
async def subscribed(
    *workers: FakeWorker, later: Sequence[FakeWorker] = (), blocks_max: int = BLOCKS_MAX
) -> AsyncIterator[tuple[PrefixSubscriber, FakeMembers]]:
    pool = FakeMembers(list(workers))
    subscriber = PrefixSubscriber(pool, PrefixIndex(blocks_max))
    async with trio.open_nursery() as nursery:
        for worker in (*workers, *later):
            worker.stage = nursery
        await nursery.start(subscriber.run)
        yield subscriber, pool
        nursery.cancel_scope.cancel()


def blocks(subscriber: PrefixSubscriber, worker: FakeWorker, hashes: range = range(100)) -> set[int]:
    match = subscriber.index.match
    return {number for number in hashes if match([number]).blocks(worker.full_name)}


def told(log: BlockLog) -> set[int]:
    return {number for _, hashes in log.blocks() for number in hashes}


def memory(tokens: int) -> EngineInfo:
    return SimulatedSpec(kv_tokens_max=tokens, page_size=16).info


def store(log: BlockLog, *hashes: int) -> None:
    log.apply([BlockEvent(STORED, 0, hashes)])


async def test_the_index_follows_every_worker(autojump_clock: MockClock) -> None:
    first, second = FakeWorker("n/a"), FakeWorker("n/b")
    store(first.log, 1, 2)
    async with subscribed(first, later=[second]) as (subscriber, pool):
        assert subscriber.unknown == {"n/a"}
        await trio.sleep(1)
        assert subscriber.unknown == frozenset()
        store(first.log, 3)
        store(second.log, 4)
        pool.all.append(second)
        pool.change()
        await trio.sleep(1)
        assert (blocks(subscriber, first), blocks(subscriber, second)) == ({1, 2, 3}, {4})
        first.log.apply([BlockEvent(REMOVED, 0, (2,))])
        await trio.sleep(1)
        assert blocks(subscriber, first) == {1, 3}


async def test_a_worker_that_comes_back_goes_on_where_it_was(autojump_clock: MockClock) -> None:
    worker = FakeWorker("n/a")
    store(worker.log, 1, 2)
    async with subscribed(worker) as (subscriber, pool):
        await trio.sleep(1)
        worker.down = True
        pool.change()
        await trio.sleep(FORGET_S / 2)
        assert blocks(subscriber, worker) == {1, 2}
        store(worker.log, 3)
        worker.down = False
        pool.change()
        await trio.sleep(1)
        assert blocks(subscriber, worker) == {1, 2, 3}
        assert worker.asked[-1] == WatchBlocks("first life", 2)


async def test_a_worker_that_stays_away_is_forgotten(autojump_clock: MockClock) -> None:
    worker = FakeWorker("n/a")
    store(worker.log, 1)
    async with subscribed(worker) as (subscriber, pool):
        await trio.sleep(1)
        worker.down = True
        pool.change()
        await trio.sleep(2 * FORGET_S + 1)
        assert blocks(subscriber, worker) == set()
        worker.down = False
        pool.change()
        await trio.sleep(1)
        assert blocks(subscriber, worker) == {1}


async def test_another_life_has_its_own_blocks(autojump_clock: MockClock) -> None:
    worker = FakeWorker("n/a")
    store(worker.log, 1, 2)
    async with subscribed(worker) as (subscriber, pool):
        await trio.sleep(1)
        worker.down = True
        await trio.sleep(1)
        worker.log, worker.down = BlockLog("second life"), False
        store(worker.log, 7)
        pool.change()
        await trio.sleep(1)
        assert blocks(subscriber, worker) == {7}


@pytest.mark.parametrize("seed", range(30))
async def test_lost_repeated_and_reordered_events_heal(seed: int, autojump_clock: MockClock) -> None:
    rng, kept = random.Random(seed), list[BlockEvents]()

    def spoil(events: BlockEvents) -> list[BlockEvents]:
        kept.append(events)
        match rng.randrange(8):
            case 0:
                return []
            case 1:
                return [events, events]
            case 2:
                return [rng.choice(kept)]
            case 3:
                return [rng.choice(kept), events]
            case _:
                return [events]

    worker = FakeWorker("n/a", spoil=spoil)
    async with subscribed(worker) as (subscriber, _):
        for _ in range(60):
            change = rng.choice([STORED, STORED, REMOVED])
            worker.log.apply([BlockEvent(change, 0, tuple(rng.choices(range(100), k=3)))])
            await trio.sleep(0.2)
        worker.spoil = lambda events: [events]
        store(worker.log, 99)  # what was lost last is noticed by the next event
        await trio.sleep(20)
        assert blocks(subscriber, worker) == told(worker.log)


async def test_a_worker_that_answers_nothing_is_asked_less_and_less(autojump_clock: MockClock) -> None:
    worker = FakeWorker("n/a", down=True)
    subscriber = PrefixSubscriber(FakeMembers([worker], unaware=True), PrefixIndex())
    with trio.move_on_after(600):
        await subscriber.run()
    assert 50 < len(worker.asked) < 80


async def test_more_events_than_the_credit_of_one_question(autojump_clock: MockClock) -> None:
    worker = FakeWorker("n/a")
    async with subscribed(worker, blocks_max=4 * CREDIT) as (subscriber, _):
        await trio.sleep(1)
        for number in range(4 * CREDIT - 8):
            store(worker.log, number)
            await trio.sleep(0.06)
        await trio.sleep(1)
        assert blocks(subscriber, worker, range(4 * CREDIT)) == told(worker.log)
        assert len(worker.asked) == 4


@pytest.mark.parametrize("data_parallel", [1, 2])
async def test_all_blocks_of_a_large_cache_fit_the_credit_of_one_question(
    data_parallel: int, autojump_clock: MockClock
) -> None:
    pages = (CREDIT + 8) * REPLY_HASHES_MAX // data_parallel
    worker = FakeWorker(
        "n/a", info=evolve(memory(pages), page_size=1, ranks=data_parallel, data_parallel=data_parallel)
    )
    for rank in range(data_parallel):
        worker.log.apply([BlockEvent(STORED, rank, tuple(range(rank * pages, (rank + 1) * pages)))])
    async with subscribed(worker) as (subscriber, _):
        await trio.sleep(10)
        assert subscriber.unknown == set()
        assert len(worker.asked) == 1
