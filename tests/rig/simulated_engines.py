"""A small simulated engine whose steps take one second, and readers of its answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from actors.engines.port import Generation
from actors.engines.simulated.batch import Batch
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.output import OutputGenerator
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import Costs, SimulatedSpec
from protocol.messages.generation import Finished, Generate, Sampling, Started, Tokens
from protocol.token_ids import TokenIds

# Binary fractions, so that times can be compared exactly.
COSTS = Costs(fixed_s=1.0, per_prefill_token_s=0.0, per_running_s=0.0)


def spec(**changes: Any) -> SimulatedSpec:
    """Return the spec of a small engine whose steps take one second."""
    few: dict[str, Any] = {"slots": 4, "waiting_max": 16, "kv_tokens_max": 4096, "context_max": 1024, "page_size": 4}
    return SimulatedSpec(**(few | {"vocabulary_size": 100, "costs": COSTS} | changes))


def batch(lines: Sequence[list[int]] = (), **changes: Any) -> Batch:
    """Return the steps of such an engine, without its clock."""
    engine_spec = spec(**changes)
    return Batch(engine_spec, OutputGenerator.from_sentences(engine_spec, lines), random.Random(0))


@asynccontextmanager
async def running(
    engine_spec: SimulatedSpec | None = None,
    lines: Sequence[list[int]] = (),
    seed: int = 0,
    meetings: RendezvousRooms | None = None,
    states: HeldStates | None = None,
) -> AsyncIterator[SimulatedEngine]:
    """Run an engine for the body."""
    engine = SimulatedEngine(
        engine_spec or spec(),
        random.Random(seed),
        lines,
        rendezvous_rooms=meetings or RendezvousRooms(),
        states=HeldStates() if states is None else states,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


def generate(
    name: str,
    prompt: int | list[int] = 4,
    tokens_max: int = 3,
    *,
    logprobs: int | None = None,
    salt: str | None = None,
    **sampling: Any,
) -> Generate:
    """Return a greedy request; a prompt that is given as a length depends on the name."""
    rng = random.Random(name)
    tokens = prompt if isinstance(prompt, list) else [rng.randrange(100) for _ in range(prompt)]
    return Generate(
        name, TokenIds.of(tokens), Sampling(tokens_max, **({"temperature": 0.0} | sampling)), logprobs, salt
    )


async def read(generation: Generation) -> tuple[list[int], Finished, list[Tokens]]:
    """Read an answer to its good end: its ids, its end, and the replies as they came."""
    replies = [reply async for reply in generation]
    assert isinstance(replies[0], Started)
    tokens = [reply for reply in replies if isinstance(reply, Tokens)]
    assert len(tokens) == len(replies) - 1, "it begins once"
    return [token for reply in tokens for token in reply.ids], await finished(generation), tokens


async def finished(generation: Generation) -> Finished:
    """Wait for the good end of an answer."""
    ended = await generation.result()
    assert isinstance(ended, Finished)
    return ended


async def timed(generation: Generation, into: list[float] | None = None) -> list[float]:
    """Read an answer, and return when each of its tokens came."""
    times = [] if into is None else into
    await generation.relay(lambda reply: times.append(trio.current_time()) if isinstance(reply, Tokens) else None)
    return times
