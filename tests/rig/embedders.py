"""Embedders for tests, and the items that they compute."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import evolve

from actors.engines.simulated.embedder import SimulatedEmbedder
from actors.engines.simulated.spec import EncodingCosts
from protocol.messages.embedding import EmbeddingInfo, EmbeddingOutput, Pooling, TextItem
from protocol.messages.engine import EngineInfo
from protocol.token_ids import TokenIds

VECTORS = EmbeddingInfo(EmbeddingOutput.VECTORS, 8, Pooling.LAST, normalised=True, is_matryoshka=True)
SCORES = EmbeddingInfo(EmbeddingOutput.SCORES, 1, Pooling.HEAD, normalised=False)
EMBEDDER = EngineInfo("simulated", "1", 100, 64, 1024, 64, 4, 16, honours_seed=True, embedding=VECTORS)
SCORER = evolve(EMBEDDER, embedding=SCORES)
COSTS = EncodingCosts(fixed_s=1.0, per_item_s=0.0, per_token_s=0.0)


def text(*ids: int, second_at: int = 0) -> TextItem:
    """Return a text, or a pair of texts."""
    return TextItem(TokenIds.of(ids), second_at)


@asynccontextmanager
async def running_embedder(engine: SimulatedEmbedder) -> AsyncIterator[SimulatedEmbedder]:
    """Run an embedder while the body runs."""
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


def simulated_embedder(info: EngineInfo = EMBEDDER, waiting_max: int = 4) -> SimulatedEmbedder:
    """Return an embedder whose batches take a second."""
    return SimulatedEmbedder(info, waiting_max, random.Random(0), COSTS)
