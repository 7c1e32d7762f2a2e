"""The operations of an SGLang engine: one handler for each row of `protocol.messages.operations` that SGLang has.

A handler runs in asyncio, beside the requests of the engine, and may wait for its scheduler. What it raises as a
`RequestError` is the answer; anything else is a fault of SGLang, and counts towards the end of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.handler import Handler
from actors.engines.sglang.host.kv import prefix_cache
from actors.engines.sglang.host.memory import Memory
from actors.engines.sglang.host.metrics import MetricsReader
from actors.engines.sglang.host.standstill import Standstill
from protocol.errors import EngineRefused, Overloaded
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF, EngineMetrics, FlushCache, GetMetrics


class Operations:
    """The operations of one engine: without `metrics` it keeps none, and `others` have handlers of their own."""

    def __init__(
        self,
        manager: TokenizerManager,
        running: Callable[[], Collection[str]],
        metrics: MetricsReader | None,
        blocks: BlockLog,
        *others: Mapping[type[Message], Handler],
    ) -> None:
        self._manager = manager
        self._running = running
        self._leaving = 0  # the number of running operations that keep the engine out of service
        self.standstill = Standstill(manager, running)
        self.handlers: Mapping[type[Message], Handler] = {
            FlushCache: self._flush_cache,
            **Memory(manager, self.standstill, blocks.clear).handlers,
        }
        if metrics is not None:
            self._metrics_reader = metrics
            self.handlers = {**self.handlers, GetMetrics: self._metrics}
        for handlers in others:
            self.handlers = {**self.handlers, **handlers}

    def add(self, handlers: Mapping[type[Message], Handler]) -> None:
        """Add handlers of other operations."""
        self.handlers = {**self.handlers, **handlers}

    async def operate(self, request: Message) -> Message:
        """Carry out an operation by its handler; raises `EngineRefused` without one."""
        if (handler := self.handlers.get(type(request))) is None:
            raise EngineRefused(f"this engine has no {type(request).__name__}")
        leaves = OPERATION_OF[type(request)].leaves_service
        self._leaving += leaves
        try:
            return await handler(request)
        finally:
            self._leaving -= leaves

    @property
    def hold_up(self) -> bool:
        """Whether one runs that may keep the scheduler from answering; its node limits its time."""
        return bool(self._leaving)

    async def _flush_cache(self, _: Message) -> Done:
        if await prefix_cache.flush_idle(self._manager, lambda: bool(self._running())) is not None:
            raise Overloaded("the prefix cache is in use")
        return Done()

    async def _metrics(self, _: Message) -> EngineMetrics:
        return await self._metrics_reader.metrics()
