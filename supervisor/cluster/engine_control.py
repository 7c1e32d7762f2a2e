"""Engine control: the load of every engine, encoder and embedder, of this node or of the cluster.

All are asked concurrently, each with its own timeout, so one that hangs does not delay the others. An answer of
another node may be wrong: impossible loads are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import trio

from actors.engines.embedding.port import Embedder
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from protocol.errors import RequestError
from protocol.messages.cluster import COUNT_MAX, RANKS_MAX, rank_name
from protocol.messages.engine import EngineLoad, GetLoad
from protocol.messages.kind import Message
from supervisor.cluster.directory import Directory
from supervisor.cluster.operations import Engines, call_each

LOADS_WITHIN_S = 1.0


async def local_loads(engines: Engines) -> dict[str, EngineLoad]:
    """Return the load of each worker of this node by its name; one that does not answer in time is left out."""
    loads: dict[str, EngineLoad] = {}

    async def ask(name: str, engine: Engine | Encoder | Embedder) -> None:
        with trio.move_on_after(LOADS_WITHIN_S), suppress(RequestError):
            loads.update(_by_worker(name, await engine.load()))

    async with trio.open_nursery() as nursery:
        for name, registration in engines.items():
            if registration.live is not None:
                nursery.start_soon(ask, name, registration.live)
    return loads


async def cluster_loads(directory: Directory) -> dict[str, EngineLoad]:
    """Return the load of each worker of the cluster by its name there; one that does not answer in time is left out.

    So is the answer of an engine that tells of more ranks than it has.
    """
    answers: dict[str, Message | RequestError | None] = {}
    await call_each(directory.engines(), GetLoad(), LOADS_WITHIN_S, answers.__setitem__)
    ranks = Counter(f"{worker.node}/{worker.engine_name}" for worker in directory.all_workers())
    return {
        worker: load
        for name, answer in sorted(answers.items())
        if isinstance(answer, EngineLoad) and len(answer.by_rank) <= ranks[name]
        for worker, load in _by_worker(name, answer)
        if _is_possible(load)
    }


def _by_worker(engine: str, load: EngineLoad) -> Iterator[tuple[str, EngineLoad]]:
    """Yield the loads of an engine's workers by their names: the engine's, or its ranks'."""
    ranks = load.by_rank[:RANKS_MAX]
    if not ranks:
        yield engine, load
    for number, rank in enumerate(ranks):
        yield (
            rank_name(engine, number, len(ranks)),
            EngineLoad(running=rank.running, waiting=rank.waiting, kv_tokens_used=rank.kv_tokens_used),
        )


def _is_possible(load: EngineLoad) -> bool:
    counts = (load.running, load.waiting, load.kv_tokens_used)
    return min(counts) >= 0 and max(counts) <= COUNT_MAX
