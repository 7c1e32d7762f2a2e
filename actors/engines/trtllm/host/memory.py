"""The release of a TensorRT-LLM engine's GPU memory by tag, and its return.

Its call for this is private (`LLM._collective_rpc`), blocks until all ranks have done it, and has names of its own for
the tags. TensorRT-LLM computes on while memory is released, and a request would end it. So none is in the engine from
the release to the return of the last tag. Weights come back from a copy in host memory. A released KV cache has lost
its contents, while the prefix cache may still name its blocks: so no later request may find one.

Some versions release no further tags once some are released. A call that fails may have changed some ranks and not
others: the host ends. Written after `tensorrt_llm/executor/base_worker.py`, and never run on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import cast

from actors.engines.host.handler import Handler
from actors.engines.host.served_link import last_line
from actors.engines.trtllm.host.library import CollectiveCall, Llm
from actors.engines.trtllm.signatures import COLLECTIVE_RPC, Signatures
from protocol.engine_state import EngineState, in_order, names
from protocol.errors import EngineRefused, InternalError, Overloaded, Unsupported
from protocol.messages.kind import Message
from protocol.messages.leaving import MemoryTag, RunningRequests
from protocol.messages.memory import MemoryState, ReleaseMemory, ResumeMemory
from protocol.messages.operations import OPERATION_OF

CALL = "_collective_rpc"
SLEEP, WAKEUP = "sleep", "wakeup"
UNSUPPORTED = "does not support collective RPC"
"""What the call says of an executor that has no such calls (`LLM._collective_rpc`), by a `ValueError`."""

PARTS: Mapping[MemoryTag, tuple[str, ...]] = {
    MemoryTag.KV_CACHE: ("kv_cache",),
    MemoryTag.WEIGHTS: ("model_weights", "draft_model_weights"),
}
"""TensorRT-LLM's own tags (`ExecutorMemoryType`) of each tag that it can release."""


class TrtllmMemory:
    """The memory of one engine of a version; `running` returns the streams of its requests.

    Without `owns_weights` another process keeps its weights. `forget_blocks` is called when the KV cache has gone, and
    `end` gets the reason when the engine cannot be trusted any more.
    """

    def __init__(
        self,
        llm: Llm,
        version: str,
        running: Callable[[], Collection[int]],
        forget_blocks: Callable[[], object],
        end: Callable[[str], None],
        *,
        owns_weights: bool,
    ) -> None:
        self._llm = llm
        self._version = version
        self._running = running
        self._forget_blocks = forget_blocks
        self._end = end
        self._owns_weights = owns_weights
        self._state = EngineState()
        self.handlers: Mapping[type[Message], Handler] = {ReleaseMemory: self._release, ResumeMemory: self._resume}

    @property
    def takes_requests(self) -> bool:
        """Whether all memory is there, and stays."""
        return not self._state.reason

    async def _release(self, request: Message) -> MemoryState:
        assert isinstance(request, ReleaseMemory)
        begun = self._state.begun(OPERATION_OF[ReleaseMemory], request)
        self._check(request)
        state = await self._call(SLEEP, begun, request, request.tags)
        if MemoryTag.KV_CACHE in request.tags:
            self._forget_blocks()
        return state

    async def _resume(self, request: Message) -> MemoryState:
        assert isinstance(request, ResumeMemory)
        begun = self._state.begun(OPERATION_OF[ResumeMemory], request)
        return await self._call(WAKEUP, begun, request, request.tags or self._state.released)

    def _check(self, request: ReleaseMemory) -> None:
        """Raise the refusal of a release that TensorRT-LLM cannot carry out, with what to do instead."""
        if request.running is RunningRequests.HOLD:
            raise Unsupported("an engine of this kind holds no requests: drain or end them", param="running")
        if others := {*request.tags} - {*PARTS}:
            why = f"{names(others)}: TensorRT-LLM releases {names(PARTS)} alone, so leave out all other tags"
            raise Unsupported(why, param="tags")
        if MemoryTag.WEIGHTS in request.tags and not self._owns_weights:
            raise Unsupported("weights: GPU Memory Service keeps them, so leave out this tag", param="tags")
        if self._state.released:
            why = (
                "TensorRT-LLM releases no further tags by itself: resume-memory first, then release all of them at once"
            )
            raise Unsupported(why, param="tags")
        if not Signatures.of(self._version).holds(COLLECTIVE_RPC) or not hasattr(self._llm, CALL):
            raise EngineRefused(f"TensorRT-LLM {self._version} cannot release its memory")
        if self._running():
            raise Overloaded("requests run")

    async def _call(
        self, method: str, begun: EngineState, request: Message, tags: Collection[MemoryTag]
    ) -> MemoryState:
        """Release or return the memory of all ranks; raises `InternalError`, and ends the engine, if that fails."""
        before, self._state = self._state, begun
        parts = [part for tag in in_order(tags) for part in PARTS[tag]]
        call = cast("CollectiveCall", getattr(self._llm, CALL))
        try:
            await asyncio.to_thread(call, method, (parts,))
        except Exception as error:
            if isinstance(error, NotImplementedError) or UNSUPPORTED in str(error):  # raised before anything is done
                self._state = before
                raise EngineRefused(f"TensorRT-LLM {self._version}: {error}") from error
            self._end(f"{method} of its memory failed: {last_line(error)}")
            raise InternalError(f"{method} of its memory failed: {type(error).__name__}") from error
        self._state = before.ended(request)
        return MemoryState(self._state.released_tags, self._state.service)
