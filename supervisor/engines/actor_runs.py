"""The actors that give requests to an engine, run with it: each waits until the engine is up, and ends with it.

An engine that is up may still be refused here: one with other ranks than its section, or of a folder that has changed
since this node read it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from actors.canary import CanaryObserver, canary
from actors.decode import decode
from actors.embedder import embedder
from actors.encoder import encoder
from actors.engines.embedding.limits import EmbedderLimits, EmbedderObserver
from actors.engines.embedding.port import Embedder
from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.limits import EncoderLimits, EncoderObserver
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.kv_admission import KvAdmission
from actors.engines.slots.shared_prefixes import SharedPrefixes
from actors.engines.slots.slots import ReachPartner, SlotObserver, Slots
from actors.kit.hand_off import KindHandOff
from actors.prefill import prefill
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.embedding import EmbeddingOutput
from protocol.model_folder import mismatch
from supervisor.cluster.engine_life import EngineLife
from supervisor.config.limits import complete
from supervisor.engines.work import LocalEmbedder, LocalEncoder, LocalEngine
from supervisor.supervision.registration import Registration

TASK_OUTPUTS = {"embed": EmbeddingOutput.VECTORS, "score": EmbeddingOutput.SCORES}
"""What the engine of each task returns."""

E = TypeVar("E", Engine, Encoder, Embedder)


async def run_requests(  # noqa: ASYNC128  # prefill and decode call started()
    local: LocalEngine,
    observers: Sequence[SlotObserver],
    reach: ReachPartner | None = None,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Run `prefill` or `decode` with an engine, by its present role, from when it is up; each rank has an observer."""
    async with _slots(local, observers, reach) as ranks:
        if local.section.leg == "prefill":
            await prefill(local.inbox, ranks, task_status=task_status)
        else:
            await decode(local.inbox, ranks, local.section.pending_prefill_max, task_status=task_status)


async def run_canary(  # noqa: ASYNC128  # canary calls started()
    local: LocalEngine,
    rank: int,
    new_id: Callable[[], str],
    new_number: Callable[[], int],
    hand_off: KindHandOff | None,
    observer: CanaryObserver,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Run `canary` with the slots of one rank of an engine, from when it has them."""
    ranks = await local.slots.wait()
    limits = local.section.canary_limits
    await canary(ranks[rank], limits, new_id, new_number, hand_off, observer, task_status=task_status)


@asynccontextmanager
async def _slots(
    local: LocalEngine, observers: Sequence[SlotObserver], reach: ReachPartner | None
) -> AsyncIterator[tuple[Slots, ...]]:
    """Wait until an engine is up, and publish the slots of its ranks; raises `StartFailed` if it has other ranks."""
    section = local.section
    async with _up(local, local.registration) as engine:
        if (number := engine.info.data_parallel) != section.data_parallel:
            raise StartFailed(f"engine {local.name} has {number} data-parallel ranks, not {section.data_parallel}")
        limits = complete(Deadlines, section.deadlines)
        shares_prefixes = local.shares_prefixes and section.leg == "both"
        ranks = tuple(
            Slots(
                engine,
                section.slots,
                limits,
                observer,
                lambda: local.registration.in_service,
                rank,
                KvAdmission.of(engine.info, Leg(section.leg), is_limit=section.admits_by_memory),
                SharedPrefixes(max(1, engine.info.page_size)) if shares_prefixes else None,
                reach=reach if section.leg == "decode" else None,
            )
            for rank, observer in enumerate(observers)
        )
        async with trio.open_nursery() as nursery:
            life = EngineLife(engine, local.registration, ranks, nursery, local.role.renew, local.newest)
            with local.slots.publish(ranks), local.life.publish(life), life:
                yield ranks
            nursery.cancel_scope.cancel(reason="the engine's actor has ended")


async def run_encoder(  # noqa: ASYNC128  # encoder calls started()
    local: LocalEncoder, cache: EmbeddingCache, observer: EncoderObserver, *, task_status: trio.TaskStatus[None]
) -> None:
    """Run `encoder` with an engine, from when that is up."""
    section = local.section
    async with _up(local, local.registration) as engine:
        cache.clear()  # its embeddings are of another life of the engine
        layout = None if local.text is None else local.text.vision
        await encoder(
            local.inbox,
            engine,
            section.slots,
            complete(EncoderLimits, section.encoder),
            cache,
            observer,
            layout,
            task_status=task_status,
        )


async def run_embedder(  # noqa: ASYNC128  # embedder calls started()
    local: LocalEmbedder, observer: EmbedderObserver, *, task_status: trio.TaskStatus[None]
) -> None:
    """Run `embedder` with an engine, from when that is up."""
    section = local.section
    async with _up(local, local.registration) as engine:
        output = None if (embedding := engine.info.embedding) is None else embedding.output
        if output is not TASK_OUTPUTS.get(section.task):
            raise StartFailed(f"engine {local.name} computes {output or 'answers'}, and its task is {section.task}")
        limits = EmbedderLimits(computing_s=section.deadlines.total_s)
        await embedder(local.inbox, engine, section.slots, limits, observer, task_status=task_status)


@asynccontextmanager
async def _up(local: LocalEngine | LocalEncoder | LocalEmbedder, registration: Registration[E]) -> AsyncIterator[E]:
    """Wait until an engine is up; at its end, send waiting requests elsewhere if that is possible."""
    engine = await registration.wait()
    if (why := mismatch(local.digest, engine.info.digest)) is not None:  # the folder has changed since the node began
        raise StartFailed(f"engine {local.name} is not asked: {why}, from what this node read when it started")
    local.on_up()
    try:
        yield engine
    finally:
        local.on_down()
