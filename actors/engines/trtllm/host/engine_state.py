"""The state of a TensorRT-LLM engine, as far as it reports it: its load, the blocks of its KV memory, its life.

Statistics come with iterations, and none come while nothing is computed. So the counts of requests are the host's own,
and only the KV memory of an engine with requests is that of the last iteration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import cast

from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.served_link import last_line
from actors.engines.trtllm.block_events import BlockTranslator
from actors.engines.trtllm.host.library import Llm
from actors.engines.trtllm.host.prefix_cache import PrefixCache
from actors.engines.trtllm.host.requests import TrtllmRequest
from actors.engines.trtllm.load import RankStatistics
from protocol.messages.engine import EngineInfo, RankLoad

STATS_S = 0.5  # longest wait for statistics in one call
RETRY_S = 0.2
BLOCKS_EVERY_S = 0.05
POLL_S = 0.5
CHECK = "_check_health"  # TensorRT-LLM's own server asks by it as well; not published


class TrtllmState:
    """The state of one engine; `end` gets the reason when the engine says that it is broken."""

    def __init__(
        self, llm: Llm, info: EngineInfo, blocks: BlockLog, cache: PrefixCache, end: Callable[[str], None]
    ) -> None:
        self._llm = llm
        self._info = info
        self._blocks = blocks
        self._translator = BlockTranslator(info.page_size, info.data_parallel, own_salt=cache.own_salt)
        self._end = end
        self._statistics = RankStatistics(info.data_parallel, info.running_max, info.page_size, info.kv_tokens_max)
        self._steps = 0  # the number of signs of life
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *, publishes: bool) -> None:
        """Read the engine's statistics from now on, and its events of blocks if it `publishes` them."""
        reading = [self._read_stats(), *([self._read_blocks()] if publishes else [])]
        self._tasks += [asyncio.get_running_loop().create_task(each) for each in reading]

    def on_step(self) -> None:
        """Note that something has been computed."""
        self._steps += 1
        self._changed.set()

    def loads(self, running: Collection[TrtllmRequest]) -> list[RankLoad]:
        """Return the load of each rank of an engine with these requests."""
        for rank in {*range(self._info.data_parallel)} - {each.request.rank for each in running}:
            self._statistics.rest(rank)
        return [
            self._load(last, [each for each in running if each.request.rank == rank])
            for rank, last in enumerate(self._statistics.loads)
        ]

    def _load(self, last: RankLoad, running: Collection[TrtllmRequest]) -> RankLoad:
        """Return the load of a rank with these requests, given that of its last statistics."""
        slots = self._info.running_max
        begun = sum(each.tokens > 0 or bool(each.state) for each in running)
        inside = max(begun, min(slots, len(running)))
        own = sum(len(each.request.tokens) + each.tokens for each in running if each.tokens or each.state)
        return RankLoad(
            running=inside,
            slots=slots,
            waiting=len(running) - inside,
            waiting_tokens=sum(len(each.request.tokens) for each in running if not each.tokens and not each.state),
            kv_tokens_used=max(last.kv_tokens_used, own),
            kv_tokens_max=last.kv_tokens_max,
            hit_rate=last.hit_rate,
            throughput=last.throughput,
        )

    def forget_blocks(self) -> None:
        """Forget all blocks, as none is found any more; their later removals are no changes."""
        self._blocks.apply(self._translator.forget())

    async def probe(self, computes: Callable[[], bool]) -> None:
        """Wait until the engine has given a sign of life, if a step of it is due; a broken engine is ended."""
        before = self._steps
        check = cast("Callable[[], bool] | None", getattr(self._llm, CHECK, None))
        if check is not None and not check():
            self._end("the engine says that it is not healthy")
        while computes() and self._steps == before:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    async def _read_stats(self) -> None:
        while True:
            try:
                async for stats in self._llm.get_stats_async(STATS_S):
                    self._note(stats)
            except Exception as error:  # noqa: BLE001  # no request depends on statistics
                last_line(error)
            await asyncio.sleep(RETRY_S)

    async def _read_blocks(self) -> None:
        while True:
            try:
                async for event in self._llm.get_kv_cache_events_async(STATS_S):
                    self._blocks.apply(self._translator.translate(event))
            except Exception as error:  # noqa: BLE001  # only the choice of an engine depends on its blocks
                last_line(error)
                self._blocks.apply(self._translator.forget())
            await asyncio.sleep(BLOCKS_EVERY_S)

    def _note(self, stats: Mapping[str, object]) -> None:
        self._statistics.note(stats)
        self.on_step()
