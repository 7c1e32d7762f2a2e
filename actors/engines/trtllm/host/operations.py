"""The operations of a TensorRT-LLM engine: one handler for each row of `protocol.messages.operations` that it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from actors.engines.host.handler import Handler
from actors.engines.trtllm.host.prefix_cache import PrefixCache
from actors.engines.trtllm.signatures import GENERATE, Signatures
from protocol.errors import EngineRefused, Overloaded
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import FlushCache


class TrtllmOperations:
    """The operations of one engine of a version; `running` returns the streams of its requests.

    `forget_blocks` is called when its prefix cache is empty; `others` have handlers of their own.
    """

    def __init__(
        self,
        version: str,
        running: Callable[[], Collection[int]],
        cache: PrefixCache,
        forget_blocks: Callable[[], object],
        *others: Mapping[type[Message], Handler],
    ) -> None:
        self._version = version
        self._running = running
        self._cache = cache
        self._forget_blocks = forget_blocks
        self.handlers: Mapping[type[Message], Handler] = {FlushCache: self._flush_cache}
        for handlers in others:
            self.handlers = {**self.handlers, **handlers}

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
        self._forget_blocks()
        return Done()
