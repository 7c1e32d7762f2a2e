"""The publisher: what watchers get of an engine's blocks and load, through its lives and its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.blocks.block_log import BlockLog
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import SimulatedSpec
from actors.kit.calls import Address
from actors.publisher import Published, Watch, WatchReply, publisher
from protocol.block_hashes import block_hashes
from protocol.errors import EngineDied, EngineRefused
from protocol.messages.engine import Done, EngineLoad, RankLoad, WatchLoad
from protocol.messages.generation import Generate, Sampling
from protocol.messages.kv_events import BlockChange, BlockEvent, BlockEvents, WatchBlocks
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from supervisor.supervision.registration import Registration
from tests.rig.calls import mailbox

PROMPT = list(range(50))
HASHES = block_hashes(PROMPT, 16)


@define(eq=False)
class Lives:
    """An engine that lives again and again, and its publisher."""

    nursery: trio.Nursery
    address: Address[Watch, WatchReply, Done]
    registration: Registration[SimulatedEngine] = field(factory=Registration)
    engine: SimulatedEngine = field(init=False)

    async def begin(self) -> None:
        self.engine = SimulatedEngine(SimulatedSpec(), random.Random(0))

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with self.registration.publish(self.engine), suppress(EngineDied):
                await self.engine.run(task_status=task_status)

        await self.nursery.start(live)

    async def answer(self, prompt: list[int] = PROMPT) -> None:
        async for _ in self.engine.submit(Generate("0" * 32, TokenIds.of(prompt), Sampling(1))):
            pass
        await trio.sleep(0.5)


@asynccontextmanager
async def publishing() -> AsyncIterator[Lives]:
    address, inbox = mailbox(8)
    async with trio.open_nursery() as nursery:
        lives = Lives(nursery, address)
        await lives.begin()
        await nursery.start(publisher, inbox, lives.registration, Published(BlockLog("life")))
        yield lives
        nursery.cancel_scope.cancel()


@define(eq=False)
class Watcher:
    """What one watcher has got."""

    replies: list[WatchReply] = field(factory=list)
    blocks: set[int] = field(factory=set)
    ended: bool = False

    async def watch(self, address: Address[Watch, WatchReply, Done], request: Watch, credit: int = 100) -> None:
        async with address.ask(request, credit) as answer:
            async for reply in answer:
                self.replies.append(reply)
                if isinstance(reply, BlockEvents):
                    self.apply(reply)
            self.ended = await answer.result() == Done()

    def apply(self, events: BlockEvents) -> None:
        if events.reset:
            self.blocks.clear()
        for event in events.events:
            if event.change is BlockChange.STORED:
                self.blocks.update(event.hashes)
            elif event.change is BlockChange.REMOVED:
                self.blocks.difference_update(event.hashes)
            else:
                self.blocks.clear()


async def test_watchers_get_what_the_engine_has_and_what_changes(autojump_clock: MockClock) -> None:
    async with publishing() as lives:
        await lives.answer()
        early, late = Watcher(), Watcher()
        lives.nursery.start_soon(early.watch, lives.address, WatchBlocks())
        await trio.sleep(1)
        assert early.blocks == set(HASHES)
        await lives.answer([7] * 32)
        lives.nursery.start_soon(late.watch, lives.address, WatchBlocks())
        await trio.sleep(1)
        assert early.blocks == late.blocks == {*HASHES, *block_hashes([7] * 32, 16)}
        await lives.engine.operate(FlushCache())
        await trio.sleep(1)
        assert early.blocks == late.blocks == set()


async def test_a_change_is_told_at_once_and_what_follows_soon_together(autojump_clock: MockClock) -> None:
    address, inbox = mailbox(8)
    published, watcher = Published(BlockLog("life")), Watcher()
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher, inbox, Registration[SimulatedEngine](), published)
        nursery.start_soon(watcher.watch, address, WatchBlocks())
        await trio.sleep(1)
        told = [len(watcher.blocks)]
        for number in range(10):
            published.blocks.apply([BlockEvent(BlockChange.STORED, 0, (number,))])
            await wait_all_tasks_blocked()
            told.append(len(watcher.blocks))
            await trio.sleep(0.003)
        await trio.sleep(1)
        replies = len(watcher.replies)
        for number in range(10, 60):  # a burst in many turns
            published.blocks.apply([BlockEvent(BlockChange.STORED, 0, (number,))])
            await trio.lowlevel.checkpoint()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert told == [0, 1, 1, 1, 1, 4, 4, 4, 7, 7, 7], "every 10 ms"
    assert len(watcher.blocks) == 60
    assert len(watcher.replies) == replies + 2, "the first of the burst, and all others together"


async def test_a_lost_engine_has_no_blocks_and_no_load_until_it_is_up_again(autojump_clock: MockClock) -> None:
    async with publishing() as lives:
        blocks, loads = Watcher(), Watcher()
        lives.nursery.start_soon(blocks.watch, lives.address, WatchBlocks())
        lives.nursery.start_soon(loads.watch, lives.address, WatchLoad())
        await lives.answer()
        assert blocks.blocks == set(HASHES)
        lives.engine.crash()
        await wait_all_tasks_blocked()
        await trio.sleep(0.02)
        assert blocks.blocks == set()
        await lives.begin()
        await lives.answer([7] * 32)
        assert blocks.blocks == set(block_hashes([7] * 32, 16))
        last = loads.replies[-1]
        assert isinstance(last, EngineLoad)
        assert (last.by_rank[0].running, last.by_rank[0].kv_tokens_max) == (0, 131_072)


async def test_the_load_is_told_when_it_changes_and_at_most_so_often(autojump_clock: MockClock) -> None:
    async with publishing() as lives:
        loads = Watcher()
        lives.nursery.start_soon(loads.watch, lives.address, WatchLoad())
        await trio.sleep(100)
        assert len(loads.replies) == 1, "an idle engine tells its load once"
        for number in range(20):
            lives.engine.submit(Generate(f"{number:032}", TokenIds.of(PROMPT), Sampling(200)))
        await trio.sleep(0.2)
        running = [reply.by_rank[0].running for reply in loads.replies if isinstance(reply, EngineLoad)]
        assert 20 in running
        assert len(running) < 10


async def test_an_answer_ends_when_its_credit_is_used_up_and_the_next_goes_on(autojump_clock: MockClock) -> None:
    async with publishing() as lives:
        first = Watcher()
        lives.nursery.start_soon(first.watch, lives.address, WatchBlocks(), 2)
        await trio.sleep(1)
        await lives.answer()
        await trio.sleep(1)
        assert first.ended
        last = first.replies[-1]
        assert isinstance(last, BlockEvents)
        await lives.answer([7] * 32)
        second = Watcher(blocks=set(first.blocks))
        lives.nursery.start_soon(second.watch, lives.address, WatchBlocks(last.life, last.number))
        await trio.sleep(1)
        assert second.blocks == {*HASHES, *block_hashes([7] * 32, 16)}
        assert not any(reply.reset for reply in second.replies if isinstance(reply, BlockEvents))


class Failing(SimulatedEngine):
    """An engine that cannot be watched at first, though it has told something."""

    def __init__(self, failures: int) -> None:
        super().__init__(SimulatedSpec(), random.Random(0))
        self.failures = {"blocks": failures, "load": failures}

    def fail(self, subject: str) -> None:
        self.failures[subject] -= 1
        if self.failures[subject] >= 0:
            raise EngineRefused("it cannot be watched now")

    async def watch_blocks(self, receive: Callable[[BlockEvents], None]) -> None:
        await trio.lowlevel.checkpoint()
        if self.failures["blocks"] > 0:
            receive(BlockEvents("former", 2, (BlockEvent(BlockChange.STORED, 0, (1, 2)),), reset=True))
        self.fail("blocks")
        await super().watch_blocks(receive)

    async def watch_load(self, receive: Callable[[EngineLoad], None]) -> None:
        await trio.lowlevel.checkpoint()
        if self.failures["load"] > 0:
            receive(EngineLoad.of_ranks([RankLoad(running=5)]))
        self.fail("load")
        await super().watch_load(receive)


async def test_an_engine_that_could_not_be_watched_is_watched_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    _, inbox = mailbox(8)
    published, engine = Published(BlockLog("life")), Failing(3)
    registration: Registration[Failing] = Registration()
    async with trio.open_nursery() as nursery:
        with registration.publish(engine):
            await nursery.start(engine.run)
            await nursery.start(publisher, inbox, registration, published)
            await trio.sleep(1.5)
            assert (published.loads, len(published.blocks)) == (None, 0), "what it told may be wrong by now"
            await trio.sleep(6)
            async for _ in engine.submit(Generate("0" * 32, TokenIds.of(PROMPT), Sampling(1))):
                pass
            await trio.sleep(1)
            assert published.loads is not None
            assert published.loads.by_rank[0].kv_tokens_max == 131_072
            assert {number for _, blocks in published.blocks.blocks() for number in blocks} == set(HASHES)
            nursery.cancel_scope.cancel()
    assert len(caplog.records) == 6
