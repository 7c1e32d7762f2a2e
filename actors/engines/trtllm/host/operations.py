"""The operations of a TensorRT-LLM engine: one handler for each row of `protocol.messages.operations` that it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, cast

from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.handler import Handler
from actors.engines.trtllm.host.library import Llm
from protocol.errors import EngineRefused, Overloaded
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import FlushCache

RESET = "reset_prefix_cache"
"""The method of the workers that drops the prefix cache: TensorRT-LLM's own, for engines whose weights are replaced."""


class _Rpc(Protocol):
    def __call__(self, method: str, *, args: tuple[object, ...], kwargs: dict[str, object]) -> object: ...


class TrtllmOperations:
    """The operations of one engine; `running` returns the streams of its requests."""

    def __init__(self, llm: Llm, running: Callable[[], Collection[int]], blocks: BlockLog) -> None:
        self._llm = llm
        self._running = running
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
        rpc = getattr(self._llm, "_collective_rpc", None)
        if rpc is None:
            raise EngineRefused("this version of TensorRT-LLM cannot drop its prefix cache")
        cast("_Rpc", rpc)(RESET, args=(), kwargs={})
        self._blocks.clear()
        return Done()
