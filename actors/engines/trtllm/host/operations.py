"""The operations of a TensorRT-LLM engine: one handler for each row of `protocol.messages.operations` that it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.handler import Handler
from actors.engines.trtllm.host.prefix_cache import PrefixCache
from actors.engines.trtllm.signatures import GENERATE, Signatures
from protocol.errors import EngineRefused, Overloaded
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import FlushCache


class TrtllmOperations:
    """The operations of one engine of a version; `running` returns the streams of its requests."""

    def __init__(
        self, version: str, running: Callable[[], Collection[int]], cache: PrefixCache, blocks: BlockLog
    ) -> None:
        self._version = version
        self._running = running
        self._cache = cache
        self._blocks = blocks
        self.handlers: Mapping[type[Message], Handler] = {FlushCache: self._flush_cache}

    async def operate(self, request: Message) -> Message:
        """Carry out an operation by its handler; raises `EngineRefused` without one."""
        if (handler := self.handlers.get(type(request))) is None:
            raise EngineRefused(f"this engine has no {type(request).__name__}")
        return await handler(request)

    async def _flush_cache(self, _: Message) -> Done:
        if self._running():
            raise Overloaded("the prefix cache is in use")
        if not Signatures.of(self._version).has(GENERATE, "cache_salt"):
            raise EngineRefused(f"TensorRT-LLM {self._version} cannot drop its prefix cache")
        self._cache.flush()
        self._blocks.clear()
        return Done()
