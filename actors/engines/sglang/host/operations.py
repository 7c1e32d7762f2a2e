"""The operations of an SGLang engine: one handler for each row of `protocol.messages.operations` that SGLang has.

A handler runs in asyncio, beside the requests of the engine, and may wait for its scheduler. What it raises as a
`RequestError` is the answer; anything else is a fault of SGLang, and counts towards the end of the host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.sglang.host.kv import prefix_cache
from actors.engines.sglang.host.metrics import MetricsReader
from protocol.errors import EngineRefused, Overloaded
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import EngineMetrics, FlushCache, GetMetrics

Handler = Callable[[Message], Awaitable[Message]]


class Operations:
    """The operations of one engine; without `metrics`, it keeps none."""

    def __init__(self, manager: TokenizerManager, is_busy: Callable[[], bool], metrics: MetricsReader | None) -> None:
        self._manager = manager
        self._is_busy = is_busy
        self.handlers: Mapping[type[Message], Handler] = {
            FlushCache: self._flush_cache,
        }
        if metrics is not None:
            self._metrics_reader = metrics
            self.handlers = {**self.handlers, GetMetrics: self._metrics}

    async def operate(self, request: Message) -> Message:
        """Carry out an operation by its handler; raises `EngineRefused` without one."""
        if (handler := self.handlers.get(type(request))) is None:
            raise EngineRefused(f"this engine has no {type(request).__name__}")
        return await handler(request)

    async def _flush_cache(self, _: Message) -> Done:
        if await prefix_cache.flush_idle(self._manager, self._is_busy) is not None:
            raise Overloaded("the prefix cache is in use")
        return Done()

    async def _metrics(self, _: Message) -> EngineMetrics:
        return await self._metrics_reader.metrics()
