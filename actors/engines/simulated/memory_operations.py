"""The release of a simulated engine's memory by tag, and its return, each in two steps that take time.

From the release to the return of the last tag the engine stands still: its requests wait in the queue with their tokens
so far. A released KV cache has no pages, as its load reports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio
from attrs import define, field

from actors.engines.simulated.batch import Batch
from protocol.engine_state import EngineState
from protocol.errors import Overloaded
from protocol.messages.kind import Message
from protocol.messages.leaving import MemoryTag, RunningRequests
from protocol.messages.memory import MemoryState, ReleaseMemory, ResumeMemory
from protocol.messages.operations import OPERATION_OF

STEP_S = 0.05  # the time of a step: to stand still, to release or return


@define(eq=False)
class MemoryOperations:
    """The operations on the memory of an engine's ranks; `changed` passes on the changes of a rank's prefix cache."""

    batches: Callable[[], Sequence[Batch]]
    changed: Callable[[Batch], None]
    wake: Callable[[], object]  # called when steps may begin again
    stands_still: bool = False
    updating: bool = False  # whether new weights need it to stand still, too
    handlers: Mapping[type[Message], Callable[[Message], Awaitable[Message]]] = field(init=False)
    _state: EngineState = EngineState()

    def __attrs_post_init__(self) -> None:
        self.handlers = {ReleaseMemory: self._release, ResumeMemory: self._resume}

    async def _release(self, request: Message) -> MemoryState:
        assert isinstance(request, ReleaseMemory)
        before = self._begin(request)
        try:
            self.stand_still(request.running)
            await trio.sleep(STEP_S)
            for batch in self.batches():
                batch.flush()
                self.changed(batch)
                if MemoryTag.KV_CACHE in request.tags:
                    batch.memory.pages_max = 0
            await trio.sleep(STEP_S)
        except BaseException:
            self._state = before
            self.restore()
            raise
        return self._ended(before, request)

    async def _resume(self, request: Message) -> MemoryState:
        assert isinstance(request, ResumeMemory)
        before = self._begin(request)
        try:
            await trio.sleep(STEP_S)
        except BaseException:
            self._state = before
            raise
        answer = self._ended(before, request)
        self.restore()
        return answer

    def restore(self) -> None:
        """Give the pages back, and begin steps, as far as nothing forbids it."""
        for batch in self.batches():
            if MemoryTag.KV_CACHE not in self._state.released:
                batch.memory.pages_max = batch.spec.pages
            if not self._state.released and not self.updating:
                batch.go_on()
        self.stands_still = bool(self._state.released) or self.updating
        self.wake()

    def stand_still(self, running: RunningRequests) -> None:
        """Let no further step begin; raises `Overloaded` if requests run that are not to be held."""
        if self.stands_still:
            return
        if running is not RunningRequests.HOLD and any(batch.running or batch.waiting for batch in self.batches()):
            raise Overloaded("requests run")
        self.stands_still = True
        for batch in self.batches():
            batch.stand_still()

    def _begin(self, request: Message) -> EngineState:
        before = self._state
        self._state = before.begun(OPERATION_OF[type(request)], request)
        return before

    def _ended(self, before: EngineState, request: Message) -> MemoryState:
        self._state = before.ended(request)
        return MemoryState(self._state.released_tags, self._state.service)
