"""Tenants at a gateway: each finds in the caches, and in the table of sessions, what it would find alone."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path

import pytest
from attrs import define, evolve, field
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from actors.kit.calls import Answer
from protocol.messages.generation import Finished, Generate, Started, Tokens
from supervisor.gateway.keys.key_sources import KeySources
from supervisor.gateway.keys.keys import Keys
from tests.rig import simulated_engines
from tests.rig.gateway import INFO, SECRET, Rig, Worker, chat, gateway_rig, post
from tests.rig.keys import as_, sha

TENANTS = {"ann": "red", "bea": "red", "cleo": "blue", "dan": "", "eve": ""}
PROMPTS = [f"The oak number {number} is old, and nobody knows who planted it so long ago" for number in range(3)]
SALTS = (None, None, "mine", "tenant:red", "tenant:red/mine")
COSTS = evolve(simulated_engines.COSTS, fixed_s=0.001)


@define(eq=False)
class EngineWorker(Worker):
    """A worker with a simulated engine in place of a script."""

    engine: SimulatedEngine = field(kw_only=True)

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer[Started | Tokens, Finished]]:
        """Compute a request with the engine."""
        self.asked.append(request)
        yield self.engine.submit(request)
        self.engine.abort(request.id)
        await self.engine.wait_released(request.id)


@asynccontextmanager
async def tenants_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Serve the keys of `TENANTS` with one simulated engine."""
    path = tmp_path / "keys.toml"
    sections = [
        f'[key.{name}]\nsha256 = "{sha(f"{name}-{SECRET}")}"\n' + (f'tenant = "{tenant}"\n' if tenant else "")
        for name, tenant in TENANTS.items()
    ]
    path.write_text("\n".join(sections))
    size = INFO.vocabulary_size
    spec = simulated_engines.spec(vocabulary_size=size, context_max=2048, kv_tokens_max=65_536, costs=COSTS)
    async with simulated_engines.running(spec) as engine, gateway_rig(worker=EngineWorker(engine=engine)) as rig:
        rig.gateway.keys = Keys(KeySources(path))
        rig.gateway.keys.load()
        yield rig


async def cached(rig: Rig, key: str, prompt: str, salt: str | None) -> int:
    """Return how many tokens of a prompt a key finds in the cache, as it is told."""
    client = await rig.client()
    fields = {} if salt is None else {"cache_salt": salt}
    reply = await client.ask(post(chat(prompt, max_tokens=2, **fields), **as_(key)))
    found: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("seed", range(2))
async def test_a_tenant_finds_in_the_prefix_cache_what_it_would_find_alone(
    seed: int, tmp_path: Path, rather_slow: MockClock
) -> None:
    rng = random.Random(seed)
    calls = [(rng.choice(list(TENANTS)), rng.choice(PROMPTS), rng.choice(SALTS)) for _ in range(40)]
    async with tenants_rig(tmp_path) as rig:
        together = [(TENANTS[call[0]], call, await cached(rig, *call)) for call in calls]
    by_tenant = groupby(sorted(together, key=lambda one: one[0]), key=lambda one: one[0])
    for _, of_tenant in by_tenant:
        found = [(call, tokens) for _, call, tokens in of_tenant]
        async with tenants_rig(tmp_path) as rig:
            assert found == [(call, await cached(rig, *call)) for call, _ in found]
        assert max(tokens for _, tokens in found) > 0, "within a tenant prompts are shared"


async def test_a_session_is_a_tenants_own(tmp_path: Path, rather_slow: MockClock) -> None:
    async with tenants_rig(tmp_path) as rig:
        client = await rig.client()
        for key in TENANTS:
            assert (await client.ask(post(chat(prompt_cache_key="mine", max_tokens=1), **as_(key)))).status == 200
        sessions = ["" if request.hints is None else request.hints.session for request in rig.worker.asked]
        by_tenant = dict(zip(TENANTS.values(), sessions, strict=True))
        assert sessions == [by_tenant[tenant] for tenant in TENANTS.values()], "one for the keys of a tenant"
        assert len(set(sessions)) == len(set(TENANTS.values()))
        assert by_tenant[""] == "mine"
