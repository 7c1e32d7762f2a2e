"""Workers that publish blocks, and a gateway that listens: the product's publishers, subscriber and index over links.

An engine here computes nothing. It stores the blocks of one prompt after the other at a fixed pace, and removes those
of the oldest one, since its memory is full, as an engine does that serves prompts which have nothing in common.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import cast

import trio
from attrs import define, field

from actors.engines.blocks.block_log import BlockLog
from actors.engines.blocks.following import follow_blocks
from actors.engines.port import Engine
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.subscriber import PrefixSubscriber
from protocol.errors import EngineLost
from protocol.messages.engine import EngineInfo, EngineLoad, RankLoad
from protocol.messages.kv_events import BlockChange, BlockEvent, BlockEvents
from supervisor.cluster.directory import Directory
from supervisor.cluster.model_pool import ModelPool
from supervisor.engines.publishers import engine_publisher
from supervisor.links.serving import Services
from supervisor.runtime import Runtime
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Child

PAGE = 16  # tokens
PROMPT_BLOCKS = 256  # 4,096 tokens
KEPT = 16  # prompts that an engine has memory for
STEPS = 4  # of the engine for one prompt, which takes a second
SPREAD_S = 0.2  # in which all engines take a step, one after the other
INDEX_BLOCKS_MAX = 5_000_000

NUMBERS = count(1)  # of the logs
RUNTIME = cast("Runtime", SimpleNamespace(new_id=lambda: f"life {next(NUMBERS)}"))


@define(eq=False)
class BlockEngine:
    """An engine with a prefix cache, which changes when it is told to."""

    info: EngineInfo
    chance: Random
    changed: int = 0  # blocks that were stored or removed
    log: BlockLog = field(factory=lambda: BlockLog(RUNTIME.new_id()))
    lost: trio.Event = field(factory=trio.Event)
    prompts: deque[tuple[int, ...]] = field(factory=deque)

    def fill(self) -> None:
        """Store as many prompts as there is memory for."""
        self.prompts.extend(self._prompt() for _ in range(KEPT))
        self.log.apply(BlockEvent(BlockChange.STORED, hashes=prompt) for prompt in self.prompts)

    def _prompt(self) -> tuple[int, ...]:
        return tuple(self.chance.getrandbits(64) - 2**63 for _ in range(PROMPT_BLOCKS))

    async def wait_lost(self) -> None:
        """Wait for the end of the engine, which does not come."""
        await self.lost.wait()

    async def watch_load(self, receive: Callable[[EngineLoad], None]) -> None:
        """Pass on one load, which does not change."""
        receive(EngineLoad.of_ranks([RankLoad()]))
        await self.lost.wait()
        raise EngineLost("the engine has ended")

    async def watch_blocks(self, receive: Callable[[BlockEvents], None]) -> None:
        """Pass on all blocks, and then each change."""
        await follow_blocks(self.log, receive, self.lost)

    async def compute(self, prompts: int, delay_s: float) -> None:
        """Store so many prompts, one a second, in several steps, each of which removes as much of the oldest prompt."""
        await trio.sleep(delay_s)
        size = PROMPT_BLOCKS // STEPS
        for _ in range(prompts):
            new, old, parent = self._prompt(), self.prompts.popleft()[::-1], None
            for start in range(0, PROMPT_BLOCKS, size):
                stored, removed = new[start : start + size], old[start : start + size]
                self.log.apply(
                    (
                        BlockEvent(BlockChange.REMOVED, hashes=removed),
                        BlockEvent(BlockChange.STORED, hashes=stored, parent=parent),
                    )
                )
                self.changed += len(stored) + len(removed)
                parent = stored[-1]
                await trio.sleep(1 / STEPS)
            self.prompts.append(new)


@define(eq=False)
class BlockWorker:
    """The engine of one worker and its publisher, as a node has them."""

    engine: BlockEngine
    publisher: Child
    services: Services

    @classmethod
    def of(cls, name: str, info: EngineInfo, registration: Registration[Engine]) -> BlockWorker:
        """Return the worker with an engine of this name, which the caller registers."""
        child, services = engine_publisher(RUNTIME, name, registration)
        return cls(BlockEngine(info, Random(name)), child, services)

    async def start(self, nursery: trio.Nursery) -> None:
        """Fill the cache, and start the publisher."""
        self.engine.fill()
        await nursery.start(partial(self.publisher.run, *self.publisher.args))


def subscriber(directory: Directory, model: str) -> PrefixSubscriber:
    """Return a gateway's subscriptions to all workers of a model."""
    return PrefixSubscriber(ModelPool(directory, model), PrefixIndex(INDEX_BLOCKS_MAX))


async def wait_known(index: PrefixIndex, workers: int) -> None:
    """Wait until the index has all blocks of so many workers."""
    with trio.fail_after(600):
        while index.statistics().blocks < workers * KEPT * PROMPT_BLOCKS:  # noqa: ASYNC110  # of many workers
            await trio.sleep(0.1)


async def publish(workers: Sequence[BlockWorker], lasts_s: int) -> None:
    """Let every engine change its cache for so many seconds, each at moments of its own."""
    async with trio.open_nursery() as nursery:
        for place, worker in enumerate(workers):
            nursery.start_soon(worker.engine.compute, lasts_s, SPREAD_S * place / len(workers))


def check_index(index: PrefixIndex, workers: Sequence[BlockWorker]) -> None:
    """Raise `AssertionError` unless the index has what the caches have, and no more."""
    prompts = [prompt for worker in workers for prompt in worker.engine.prompts]
    assert index.statistics().blocks == sum(map(len, prompts))
    for prompt in prompts:
        ((blocks, _),) = index.match(prompt).groups
        assert blocks == len(prompt)
