"""The real engine: its KV events, and how well a router predicts by them what it finds in its prefix cache."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pytest
import trio
from attrs import define, evolve, field

from actors.engines.port import Engine
from actors.routing.policies.kv.index import PrefixIndex
from bench.rig.node import free_ports
from protocol.block_hashes import block_hashes
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import FinishReason, Generate, Sampling, Started
from protocol.messages.kv_events import BlockEvents
from protocol.messages.leaving import MemoryTag
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from supervisor.engines.sglang import spawn
from tests.contracts.engine import complete, new_id
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

PAGE = 16
SETTLED_S = 0.3  # after an answer: its events have come
EVICTING = {"publishes": True, "kv_tokens_max": 1024, "slots": 4}
OUTSIDER = """
import sys, espalier_sglang_cpu, msgspec, zmq
espalier_sglang_cpu.prepare()
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch
subscriber = zmq.Context.instance().socket(zmq.SUB)
subscriber.setsockopt(zmq.SUBSCRIBE, b"kv-events")
subscriber.connect(sys.argv[1])
print("subscribed", flush=True)
while True:
    topic, number, payload = subscriber.recv_multipart()
    for event in msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events:
        if isinstance(event, BlockStored):
            print(*event.block_hashes, flush=True)
"""


@define(eq=False)
class Watched:
    """An engine, and the index of its blocks that its events make."""

    engine: Engine
    index: PrefixIndex = field(factory=PrefixIndex)
    events: list[BlockEvents] = field(factory=list)
    ids: count[int] = field(factory=partial(count, 1))

    def apply(self, events: BlockEvents) -> None:
        self.events.append(events)
        if events.reset:
            self.index.forget("engine")
        self.index.apply("engine", events.events)

    async def ask(self, prompt: list[int], tokens_max: int = 4, salt: str | None = None) -> tuple[int, int]:
        """Return how many tokens of a prompt are expected in the cache, and how many were found."""
        hashes = block_hashes(prompt, PAGE, salt)
        blocks = self.index.match(hashes).blocks("engine")
        request = Generate(
            f"{next(self.ids):032x}",
            TokenIds.of(prompt),
            Sampling(tokens_max, temperature=0, ignore_eos=True),
            cache_salt=salt,
        )
        found = -1
        async for reply in self.engine.submit(request):
            if isinstance(reply, Started):
                found = reply.cached_tokens
        await self.engine.wait_released(request.id)
        await trio.sleep(SETTLED_S)
        return min(blocks, (len(prompt) - 1) // PAGE) * PAGE, found


@asynccontextmanager
async def watched(make_engine: MakeEngine, **changes: object) -> AsyncIterator[Watched]:
    async with make_engine(**changes) as engine, trio.open_nursery() as nursery:
        seen = Watched(engine)
        nursery.start_soon(engine.watch_blocks, seen.apply)
        await trio.sleep(SETTLED_S)
        yield seen
        nursery.cancel_scope.cancel(reason="the test has ended")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 400) for _ in range(length)]


async def test_what_is_expected_in_the_cache_is_found_there(make_engine: MakeEngine) -> None:
    async with watched(make_engine, **EVICTING) as seen:
        first = prompt(1, 100)
        assert await seen.ask(first) == (0, 0)
        assert await seen.ask(first) == (96, 96)
        assert await seen.ask(first[:50] + prompt(2, 50)) == (48, 48)
        assert await seen.ask(first, salt="tenant") == (0, 0)
        assert await seen.ask(first, salt="tenant") == (96, 96)
        conversation = prompt(3, 60)
        for turn in range(4):  # each turn repeats what was said before, answers included
            expected, found = await seen.ask(conversation, tokens_max=20)
            assert expected == found
            conversation = [*conversation, *prompt(10 + turn, 21)]
        await seen.engine.operate(FlushCache())
        await trio.sleep(SETTLED_S)
        assert await seen.ask(first) == (0, 0)
        await seen.engine.operate(ReleaseMemory(tags=(MemoryTag.KV_CACHE,)))
        await trio.sleep(SETTLED_S)
        assert not seen.index.match(block_hashes(first, PAGE, None)).blocks("engine")
        await seen.engine.operate(ResumeMemory())
        await trio.sleep(SETTLED_S)
        assert await seen.ask(first) == (0, 0)
        assert await seen.ask(first) == (96, 96)


@pytest.mark.nightly
async def test_what_is_stored_is_told_while_others_are_answered(make_engine: MakeEngine) -> None:
    never = {"decode_log_interval": 1_000_000}  # SGLang publishes with its statistics, else
    spec = EVICTING | {"kv_tokens_max": 8192, "context_max": 4096, "settings": never}
    async with watched(make_engine, **spec) as seen, trio.open_nursery() as nursery:
        greedy = Sampling(4000, temperature=0, ignore_eos=True)
        other = seen.engine.submit(Generate("f" * 32, TokenIds.of(prompt(1, 20)), greedy))
        nursery.start_soon(other.result)
        conversation = prompt(2, 60)
        answer, _ = await complete(
            seen.engine, Generate("e" * 32, TokenIds.of(conversation), evolve(greedy, tokens_max=21))
        )
        blocks = block_hashes([*conversation, *answer[:-1]], PAGE)
        with trio.move_on_after(SETTLED_S):
            while seen.index.match(blocks).blocks("engine") < 80 // PAGE:  # noqa: ASYNC110  # events have no end
                await trio.sleep(0.01)
        assert seen.index.match(blocks).blocks("engine") == 80 // PAGE
        assert not other.over.is_set()
        seen.engine.abort("f" * 32)
        nursery.cancel_scope.cancel(reason="the test has ended")


@pytest.mark.nightly
async def test_evictions_are_told(make_engine: MakeEngine) -> None:
    rng = random.Random(5)
    prompts = [prompt(number, 160) for number in range(12)]  # twice as much as the memory holds
    async with watched(make_engine, **EVICTING) as seen:
        results = [await seen.ask(rng.choice(prompts)) for _ in range(30)]
    wrong = [result for result in results if result[0] != result[1]]
    assert not wrong
    assert 3 < sum(expected > 0 for expected, _ in results) < 27, "some are found, and some are evicted"


@pytest.mark.nightly
async def test_events_that_were_missed_are_replayed(make_engine: MakeEngine) -> None:
    async with make_engine(**EVICTING) as engine:
        before = Watched(engine)
        for number in range(5):
            await before.ask(prompt(number, 100))
        late = Watched(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.watch_blocks, late.apply)
            await trio.sleep(SETTLED_S)
            assert [await late.ask(prompt(number, 100)) for number in range(5)] == [(96, 96)] * 5
            nursery.cancel_scope.cancel()


@pytest.mark.nightly
async def test_the_load_is_told_with_what_changes(make_engine: MakeEngine) -> None:
    loads = list[EngineLoad]()
    async with make_engine(**EVICTING) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch_load, loads.append)
        await trio.sleep(1.5)
        assert len(loads) == 1, "an idle engine tells its load once"
        assert (loads[0].by_rank[0].running, loads[0].by_rank[0].slots) == (0, 4)
        await Watched(engine).ask(prompt(1, 200), tokens_max=300)
        await trio.sleep(1.5)
        ranks = [each.by_rank[0] for each in loads]
        assert max(rank.running for rank in ranks) == 1
        assert max(rank.kv_tokens_used for rank in ranks) > 200
        assert ranks[-1].running == 0
        assert all(rank.kv_tokens_max >= 1024 for rank in ranks)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def outsider(port: int) -> AsyncIterator[trio.abc.ReceiveStream]:
    """Run a subscriber of its own process, which decodes events with SGLang's classes; yield what it prints of them."""
    command = [sys.executable, "-c", OUTSIDER, f"tcp://127.0.0.1:{port}"]
    environment = spawn.host_environment(dict(os.environ), "cpu")
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdout=-1, env=environment, check=False)
        process = await nursery.start(run)
        try:
            with trio.fail_after(120):
                assert (await process.stdout.receive_some()).startswith(b"subscribed")
                await trio.sleep(1)
                yield process.stdout
        finally:
            process.kill()


@pytest.mark.nightly
async def test_an_outsider_decodes_the_events_with_classes_of_sglang(make_engine: MakeEngine) -> None:
    port, replay = free_ports(2)
    addresses = {"events_address": f"127.0.0.1:{port}", "events_replay_address": f"127.0.0.1:{replay}"}
    async with watched(make_engine, **EVICTING, **addresses) as seen, outsider(port) as output:
        wanted = prompt(1, 100)
        await seen.ask(wanted)
        await hear(output, wanted)


async def hear(output: trio.abc.ReceiveStream, wanted: list[int]) -> None:
    """Wait until an outsider has heard of all blocks of a prompt."""
    told = set[int]()
    while not set(block_hashes(wanted, PAGE)) <= told:
        told |= {int(word) for word in (await output.receive_some()).split()}


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [True, False])
async def test_the_token_that_stops_an_answer_is_cached_if_the_engine_computes_ahead(
    make_engine: MakeEngine, *, ahead: bool
) -> None:
    """Of an answer that reaches its length the last token never is; both end a page here."""
    async with make_engine(slots=4, kv_tokens_max=4096, settings={"disable_overlap_schedule": not ahead}) as engine:
        assert engine.info.computes_ahead == ahead
        greedy, cached = Sampling(PAGE // 2, temperature=0.0), dict[FinishReason, int]()
        for seed in range(100):
            wanted = Generate(new_id(), TokenIds.of(prompt(seed, 2 * PAGE + PAGE // 2)), greedy)
            answer, ended = await complete(engine, wanted)
            if ended.reason is FinishReason.STOP or answer[-1] in answer[:-1]:
                continue
            for sampling in (greedy, evolve(greedy, tokens_max=PAGE, stop_token_ids=(answer[-1],))):
                salted = evolve(wanted, id=new_id(), sampling=sampling, cache_salt=new_id())
                _, ended = await complete(engine, salted)
                again = evolve(
                    salted, id=new_id(), tokens=TokenIds.of([*wanted.tokens, *answer, 1]), sampling=Sampling(1)
                )
                _, found = await complete(engine, again)
                cached[ended.reason] = found.usage.cached_tokens
            break
        assert cached == {FinishReason.LENGTH: 2 * PAGE, FinishReason.STOP: (3 if ahead else 2) * PAGE}
