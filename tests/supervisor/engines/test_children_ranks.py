"""Data-parallel ranks from the file to the answer: each is a worker of its own, and all of them are one engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.simulated.engine import SimulatedEngine
from protocol.messages.generation import Generate, Sampling
from protocol.messages.text import Respond, Role, Turn
from protocol.token_ids import TokenIds
from supervisor.cluster.engine_control import local_loads
from supervisor.cluster.engine_service import EngineService
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.request_record import RequestRecord
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.tasks import append_result
from tests.supervisor.config.test_load import ROOT, Written

FILE = f"""
[gateway]
port = 0
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
policy = "kv"
[engine.e]
model = "tiny"
kind = "simulated"
data_parallel = 2
slots = 2
kv_tokens_max = 512
canary.after_s = 5
canary.within_s = 2
simulated.costs.fixed_s = 0.1
"""
PROMPT = [5 + place % 300 for place in range(64)]


@asynccontextmanager
async def running(written: Written, text: str = FILE) -> AsyncIterator[tuple[Assembly, Metrics]]:
    """Run the children of a node but its gateway."""
    assembly, metrics = built_assembly(read_cluster(written(text)), "main")
    gateway, *others = assembly.tree.children
    children = tuple(evolve(child, needs=tuple({*(child.needs or ())} - {gateway.name})) for child in others)
    tree = evolve(assembly.tree, children=children)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: supervise(tree, rng=random.Random(0), task_status=task_status))
        yield assembly, metrics
        nursery.cancel_scope.cancel()


def generate(number: int, tokens: list[int] = PROMPT, tokens_max: int = 5) -> Generate:
    return Generate(f"{number:032x}", TokenIds.of(tokens), Sampling(tokens_max, temperature=0.0, ignore_eos=True))


async def ask(worker: Any, request: Generate) -> list[int]:
    """Return the cached tokens of an answer, and then its tokens."""
    async with worker.ask(request, request.sampling.tokens_max) as answer:
        first, *others = [reply async for reply in answer]
        return [first.cached_tokens, *(token for reply in others for token in reply.ids)]


def engine_of(assembly: Assembly) -> SimulatedEngine:
    engine = assembly.directory.local["e#0"].engine.live
    assert isinstance(engine, SimulatedEngine)
    return engine


async def test_each_rank_is_a_worker_and_a_prefix_is_found_on_the_rank_that_has_it(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written) as (assembly, _):
        first, second = assembly.directory.local.values()
        assert [worker.full_name for worker in (first, second)] == ["main/e#0", "main/e#1"]
        cached, *tokens = await ask(first, generate(1))
        assert cached == 0
        assert await ask(second, generate(2)) == [0, *tokens]
        assert await ask(first, generate(3)) == [48, *tokens]
        (cached, *_) = await ask(second, generate(4, PROMPT[:48]))
        assert cached == 32  # the last page of a prompt is computed anew
        loads = await local_loads({"e": first.engine})
        assert {name: load.running for name, load in loads.items()} == {"e#0": 0, "e#1": 0}


async def test_a_rank_that_is_full_delays_no_request_for_another(written: Written, autojump_clock: MockClock) -> None:
    async with running(written) as (assembly, _), trio.open_nursery() as clients:
        first, second = assembly.directory.local.values()
        for number in range(6):
            clients.start_soon(ask, first, generate(number, tokens_max=100))
        await wait_all_tasks_blocked()
        began_at = trio.current_time()
        await ask(second, generate(9))
        assert trio.current_time() - began_at < 0.6
        assert [worker.load.busy for worker in (first, second)] == [6, 0]
        counts = {name: load.running for name, load in (await local_loads({"e": first.engine})).items()}
        assert counts == {"e#0": 2, "e#1": 0}
        clients.cancel_scope.cancel()


async def test_a_rank_that_stands_still_while_idle_is_found_and_the_engine_replaced(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written) as (assembly, metrics):
        frozen = engine_of(assembly)
        frozen.stall(1e6, rank=1)
        began_at = trio.current_time()
        while assembly.directory.local["e#1"].engine.live in {frozen, None}:
            await trio.sleep(0.1)
            assert trio.current_time() - began_at < 5 + 2 + 6
        text = metrics.render({}).decode()
        assert 'espalier_canaries_total{engine="main/e",outcome="late",rank="1"} 1.0' in text


async def test_status_and_metrics_show_each_rank(written: Written, autojump_clock: MockClock) -> None:
    async with running(written) as (assembly, metrics):
        status: Any = await assembly.controls._status()  # noqa: SLF001  # what an operator gets over a socket
        assert [(offer.name, offer.slots, offer.up) for offer in status.state.offers] == [
            ("e#0", 2, True),
            ("e#1", 2, True),
        ]
        assert {"canary-0", "canary-1"} <= {child.path.rpartition("/")[2] for child in assembly.status.members()}
        text = metrics.render({}).decode()
        assert 'espalier_engine_slots{engine="main/e#1"} 2.0' in text


# Through the router ---------------------------------------------------------------------


async def answer(assembly: Assembly, number: int, tokens_max: int = 5, text: str = "an oak") -> str:
    """Ask as a client does, and return where the request went."""
    assert assembly.gateway is not None
    turns = (Turn(Role.USER, text),)
    request = Respond(f"{number << 16:032x}", turns, tokens_max=tokens_max, ignore_eos=True)
    record = RequestRecord(request.id, "tiny", "chat", trio.current_time())
    served = assembly.gateway.runner.served["tiny"]
    await assembly.gateway.answer(request, served, record, lambda _: None, lambda answered: answered)
    assert record.route is not None
    return record.route.workers


async def test_requests_are_spread_over_the_ranks_and_equal_prompts_go_where_they_are_cached(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written) as (assembly, _):
        went: list[str] = []
        async with trio.open_nursery() as clients:
            for number in range(4):
                clients.start_soon(append_result, went, answer, assembly, number, 20, f"{number} oaks")
        assert Counter(went) == {"main/e#0": 2, "main/e#1": 2}
        text = "an oak that is old " * 20
        first = await answer(assembly, 10, text=text)
        await trio.sleep(1)
        assert {await answer(assembly, number, text=text) for number in range(11, 16)} == {first}


async def test_no_memory_is_promised_twice_by_nodes_that_route_by_themselves(
    written: Written, autojump_clock: MockClock
) -> None:
    text = FILE.replace("slots = 2", "slots = 16")
    async with running(written, text) as (assembly, _):
        first, second = assembly.directory.local.values()
        routers = [EngineService(first, name, (second,)) for name in ("a", "b")]
        most, done = [0, 0], 0
        async with trio.open_nursery() as clients:

            async def client(number: int) -> None:
                nonlocal done
                request = generate(number, PROMPT[: 8 + number % 40], tokens_max=20 + number * 7 % 150)
                await ask(routers[number % 2], evolve(request, rank=number // 2 % 2))
                done += 1

            for number in range(60):
                clients.start_soon(client, number)
            while done < 60:
                load = await engine_of(assembly).load()
                assert [rank.waiting for rank in load.by_rank] == [0, 0]
                most = [max(before, rank.running) for before, rank in zip(most, load.by_rank, strict=True)]
                await trio.sleep(0.05)
        assert min(most) > 1
        assert [worker.load.busy for worker in (first, second)] == [0, 0]


PAIR = (
    FILE.replace("data_parallel = 2", 'leg = "prefill"\ndata_parallel = 2').replace('"kv"', '"round_robin"')
    + """
[engine.d]
model = "tiny"
kind = "simulated"
leg = "decode"
data_parallel = 3
slots = 4
kv_tokens_max = 512
simulated.costs.fixed_s = 0.1
"""
)


async def test_each_rank_of_a_prefill_meets_each_rank_of_a_decode(written: Written, autojump_clock: MockClock) -> None:
    async with running(written, PAIR) as (assembly, _):
        went: list[str] = []
        async with trio.open_nursery() as clients:
            for number in range(24):
                clients.start_soon(append_result, went, answer, assembly, number)
        ranks = {f"main/e#{prefill}+main/d#{decode}" for prefill in range(2) for decode in range(3)}
        assert set(went) == ranks
        load = [worker.load for worker in assembly.directory.local.values()]
        assert [(each.busy, each.pending) for each in load] == [(0, 0)] * 5


async def test_a_crash_costs_all_ranks_a_restart_and_then_they_are_asked_again(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written) as (assembly, _):
        engine_of(assembly).crash()
        await wait_all_tasks_blocked()
        went: list[str] = []
        async with trio.open_nursery() as clients:
            for number in range(4):
                clients.start_soon(append_result, went, answer, assembly, number)
        assert set(went) == {"main/e#0", "main/e#1"}
