"""The release of an SGLang engine's memory by tag, and its return.

SGLang ends its scheduler at a release while requests run, and at a return of what was not released. So the state of the
engine is checked first, as its node has done, and the engine stands still from the release to the return of the last
tag. Only an engine with `enable_memory_saver` gives bytes back, which needs CUDA: on any other one SGLang empties the
KV cache and keeps the memory. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.sglang.host.standstill import Standstill
from protocol.engine_state import EngineState, in_order
from protocol.errors import EngineRefused
from protocol.messages.kind import Message
from protocol.messages.leaving import MemoryTag
from protocol.messages.memory import MemoryState, ReleaseMemory, ResumeMemory
from protocol.messages.operations import OPERATION_OF

RELEASE = "release-memory"


class Memory:
    """The memory of one engine; `forget_blocks` is called when its KV cache has gone."""

    def __init__(self, manager: TokenizerManager, standstill: Standstill, forget_blocks: Callable[[], object]) -> None:
        self._manager = manager
        self._standstill = standstill
        self._forget_blocks = forget_blocks
        self._state = EngineState()
        self.handlers: Mapping[type[Message], Callable[[Message], Awaitable[Message]]] = {
            ReleaseMemory: self._release,
            ResumeMemory: self._resume,
        }

    async def _release(self, request: Message) -> MemoryState:
        assert isinstance(request, ReleaseMemory)
        self._check_weights(request)
        before = self._begin(request)
        try:
            await self._standstill.begin(RELEASE, request.running, request.within_s)
            self._forget_blocks()
            tags = [str(tag) for tag in in_order(request.tags)]
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        except BaseException:
            self._state = before
            raise
        return self._ended(before, request)

    async def _resume(self, request: Message) -> MemoryState:
        assert isinstance(request, ResumeMemory)
        before = self._begin(request)
        # SGLang ends its scheduler at the second of two equal tags.
        tags = [str(tag) for tag in in_order(request.tags or before.released)]
        try:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
        except BaseException:
            self._state = before
            raise
        answer = self._ended(before, request)
        if not answer.released:
            await self._standstill.end(RELEASE)
        return answer

    def _check_weights(self, request: ReleaseMemory) -> None:
        """Raise `EngineRefused` for weights that would not return: SGLang keeps no copy unless it is told to."""
        arguments = self._manager.server_args
        loses = arguments.enable_memory_saver and not arguments.enable_weights_cpu_backup
        if loses and MemoryTag.WEIGHTS in request.tags:
            why = "the weights would be lost: set settings.enable_weights_cpu_backup = true, or leave out this tag"
            raise EngineRefused(why, param="tags")

    def _begin(self, request: Message) -> EngineState:
        before = self._state
        self._state = before.begun(OPERATION_OF[type(request)], request)
        return before

    def _ended(self, before: EngineState, request: Message) -> MemoryState:
        self._state = before.ended(request)
        return MemoryState(self._state.released_tags, self._state.service)
