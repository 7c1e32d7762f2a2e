"""Data-parallel ranks from the file to the answer: each is a worker of its own, and all of them are one engine."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.simulated.engine import SimulatedEngine
from protocol.errors import BadRequest
from protocol.messages import Generate, Sampling
from supervisor.cluster.engine_control import local_loads
from supervisor.cluster.guarded_worker import GuardedWorker
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
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
    return Generate(f"{number:032x}", tokens, Sampling(tokens_max, temperature=0.0, ignore_eos=True))


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


async def test_a_request_for_a_rank_that_there_is_not_is_refused(written: Written, autojump_clock: MockClock) -> None:
    async with running(written) as (assembly, _):
        first, *others = assembly.directory.local.values()
        guarded = GuardedWorker(first, "other", tuple(others))
        for rank in (-1, 2):
            with pytest.raises(BadRequest, match=r"rank must be from 0 to 1"):
                await ask(guarded, evolve(generate(1), rank=rank))
        await ask(guarded, evolve(generate(2), rank=1))
        assert [reader.rank for reader in engine_of(assembly)._blocks._tail] == [1]  # noqa: SLF001


async def test_status_and_metrics_show_each_rank(written: Written, autojump_clock: MockClock) -> None:
    async with running(written) as (assembly, metrics):
        status: Any = await assembly.controls._status()  # noqa: SLF001  # what an operator gets over a socket
        assert [(offer.name, offer.slots, offer.up) for offer in status.state.offers] == [
            ("e#0", 2, True),
            ("e#1", 2, True),
        ]
        assert {"canary-0", "canary-1"} <= {child.path.rpartition("/")[2] for child in status.tree}
        text = metrics.render({}).decode()
        assert 'espalier_engine_slots{engine="main/e#1"} 2.0' in text
