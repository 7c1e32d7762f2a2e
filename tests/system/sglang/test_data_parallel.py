"""The real engine with two data-parallel ranks: each is asked as routed, and all of them are one engine."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from itertools import count

import pytest
import trio
from openai import OpenAI

from actors.engines.port import Engine
from actors.routing.policies.kv.index import PrefixIndex
from bench.rig.node import SGLANG, Node, free_port, node, short_folder, wait_until
from bench.rig.processes import ProcessEntry, usage
from protocol.block_hashes import block_hashes
from protocol.errors import BadRequest, Overloaded
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Generate, Sampling, Started, Tokens
from protocol.messages.kv_events import BlockEvents
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from tests.system.sglang.conftest import MakeEngine
from tests.system.sglang.greedy import all_completed, prompts

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

RANKS = {"data_parallel": 2, "slots": 4, "kv_tokens_max": 2048, "publishes": True}
PROMPT = [5 + place % 200 for place in range(64)]
SETTLED_S = 0.5  # after an answer: its events have come
IDS = count(1)
PROMPTS = prompts(24, longest=200, seed=7)


async def ask(engine: Engine, rank: int, prompt: list[int] = PROMPT, tokens_max: int = 8) -> tuple[int, list[int]]:
    """Return the cached tokens of an answer, and its tokens."""
    sampling = Sampling(tokens_max, temperature=0.0, ignore_eos=True)
    request = Generate(f"{next(IDS):032x}", TokenIds.of(prompt), sampling, rank=rank)
    cached, tokens = -1, list[int]()
    async for reply in engine.submit(request):
        if isinstance(reply, Started):
            cached = reply.cached_tokens
        elif isinstance(reply, Tokens):
            tokens += reply.ids
    await engine.wait_released(request.id)
    return cached, tokens


async def test_each_rank_answers_what_is_asked_of_it_with_events_and_a_load_of_its_own(
    make_engine: MakeEngine,
) -> None:
    index, loads = PrefixIndex(), list[EngineLoad]()

    def apply(events: BlockEvents) -> None:
        if events.reset:
            index.forget("e")
        index.apply("e", events.events)

    async with make_engine(slots=4, kv_tokens_max=2048) as alone:
        _, expected = await ask(alone, 0)
    async with make_engine(**RANKS) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch_blocks, apply)
        nursery.start_soon(engine.watch_load, loads.append)
        await trio.sleep(SETTLED_S)
        assert (engine.info.data_parallel, engine.info.kv_tokens_max) == (2, 2048)
        assert await ask(engine, 1) == (0, expected)
        await trio.sleep(SETTLED_S)
        found = index.match(block_hashes(PROMPT, 16))
        assert (found.blocks("e", 0), found.blocks("e", 1)) == (0, 4)
        assert await ask(engine, 0) == (0, expected)  # the other rank has it, not this one
        assert await ask(engine, 0) == (48, expected)
        assert await ask(engine, 1) == (48, expected)
        await trio.sleep(SETTLED_S)
        assert index.match(block_hashes(PROMPT, 16)).blocks("e", 0) == 4
        with pytest.raises(BadRequest, match="rank must be from 0 to 1"):
            await ask(engine, 2)
        async with trio.open_nursery() as asking:
            long = Generate("f" * 32, TokenIds.of(PROMPT), Sampling(1500, temperature=0.0, ignore_eos=True), rank=1)
            engine.submit(long)
            await trio.sleep(1.0)
            load = await engine.load()
            assert [rank.running for rank in load.by_rank] == [0, 1]
            assert load.running == 1
            await trio.sleep(0.3)
            assert [rank.running for rank in loads[-1].by_rank] == [0, 1]
            with pytest.raises(Overloaded):
                await engine.operate(FlushCache())  # of one rank that is busy
            engine.abort(long.id)
            await engine.wait_released(long.id)
            asking.cancel_scope.cancel()
        await engine.operate(FlushCache())
        await trio.sleep(SETTLED_S)
        found = index.match(block_hashes(PROMPT, 16))
        assert (found.blocks("e", 0), found.blocks("e", 1)) == (0, 0)
        nursery.cancel_scope.cancel()


def processes_of(running: Node, name: str) -> list[ProcessEntry]:
    """Return the living processes of a node whose command begins with a name, the oldest first."""
    living = [entry for entry in running.living() if entry.command.startswith(name)]
    return sorted(living, key=lambda entry: entry.pid)


def routes(client: OpenAI, count: int) -> set[str]:
    """Return where requests went that were asked together."""

    def ask_one(number: int) -> str:
        asked = client.completions.with_raw_response.create(
            model="tiny", prompt=f"oak {number}", max_tokens=60, extra_body={"ignore_eos": True}
        )
        return asked.headers["x-route"].partition(";")[0]

    with ThreadPoolExecutor(count) as threads:
        return set(threads.map(ask_one, range(count)))


@pytest.mark.parametrize("first", ["OMP_NUM_THREADS", "TMPDIR"])
def test_processes_have_their_titles_whatever_the_environment_begins_with(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host sets these itself, and the place where titles are written is found by the first variable."""
    inherited = {first: "1", **os.environ}
    for name in (*os.environ,):
        monkeypatch.delenv(name)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    with short_folder() as folder, node(folder, slots=4, engine=SGLANG) as running:
        assert len(processes_of(running, "sglang::scheduler")) == 1


def test_a_node_asks_both_ranks_and_a_killed_one_costs_the_engine_a_restart() -> None:
    with (
        short_folder() as folder,
        node(folder, slots=4, engine=SGLANG + "data_parallel = 2\nmetrics = true\n") as running,
        OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=3) as client,
    ):
        assert routes(client, 6) == {"main/tiny-0#0", "main/tiny-0#1"}
        for rank in range(2):
            assert running.metric("espalier_engine_slots", engine=f"main/tiny-0#{rank}") == 4
            assert running.metric("sglang:realtime_tokens_total", engine="main/tiny-0", rank=f"{rank}") > 0
        controller, schedulers = processes_of(running, "sglang::data"), processes_of(running, "sglang::scheduler")
        assert (len(controller), len(schedulers)) == (1, 2)
        before = usage(controller[0].pid)
        time.sleep(2.0)
        assert usage(controller[0].pid).cpu_s - before.cpu_s < 0.5  # it waits
        os.kill(schedulers[1].pid, signal.SIGKILL)
        assert wait_until(lambda: not schedulers[0].lives, 60.0) is not None
        assert wait_until(lambda: len(both(running)) == 2, 120.0) is not None
        running.wait_ready()
        assert routes(client, 6) == {"main/tiny-0#0", "main/tiny-0#1"}
        assert {entry.pid for entry in both(running)}.isdisjoint(entry.pid for entry in schedulers)


def test_a_rank_that_stands_still_is_found_while_another_computes() -> None:
    lines = "data_parallel = 2\ncanary.after_s = 1.0\ncanary.within_s = 4.0\n"
    with (
        short_folder() as folder,
        node(folder, slots=4, engine=SGLANG + lines) as running,
        OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=3) as client,
    ):
        before = both(running)
        (frozen,) = (entry for entry in before if "DP1" in entry.command)
        os.kill(frozen.pid, signal.SIGSTOP)
        began_at = time.monotonic()
        while frozen.lives and time.monotonic() < began_at + 30:  # one after the other, so at the first rank
            assert routes(client, 1)
        assert not frozen.lives, running.output()
        assert running.metric("espalier_canaries_total", rank="1", outcome="late") == 1
        assert running.metric("espalier_canaries_total", rank="0", outcome="late") == 0


PAIR = """device = "cpu"
leg = "decode"
data_parallel = 2
kv_tokens_max = 4096
[engine.tiny-1]
model = "tiny"
device = "cpu"
leg = "prefill"
bootstrap_port = {port}
data_parallel = 2
slots = 4
kv_tokens_max = 4096
"""


@pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1")
def test_each_rank_of_a_prefill_hands_over_to_each_rank_of_a_decode(served: Node) -> None:
    with (
        short_folder() as folder,
        node(folder, slots=4, engine=PAIR.format(port=free_port())) as running,
        OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none") as client,
    ):
        seen = set[str]()
        ranks = [f"main/tiny-1#{prefill}+main/tiny-0#{decode}" for prefill in range(2) for decode in range(2)]
        # Few at once, and by a client that asks again as all do: Mooncake spins while it transfers, and starves two cores.
        for _ in range(20):
            seen |= routes(client, 4)
            if seen == {*ranks}:
                break
        assert seen == {*ranks}
        wanted, got = (all_completed(port, PROMPTS, 4) for port in (served.port, running.port))
        assert [tokens for tokens, *_ in got] == [tokens for tokens, *_ in wanted]
        assert "hand_off_failed" not in running.output()


def both(running: Node) -> list[ProcessEntry]:
    return processes_of(running, "sglang::scheduler")
