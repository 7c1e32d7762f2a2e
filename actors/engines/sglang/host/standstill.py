"""An SGLang engine that stands still for an operation: no step runs, and requests keep their places.

SGLang's `retract` takes the running requests out of the batch and into the queue, with their tokens so far: their KV
cache is free, and is computed anew when they go on. Control messages are answered meanwhile, and aborts too. Several
operations may need the engine to stand still, each under a name of its own; it goes on when the last one has ended.
Written for SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.sglang.host.kv import prefix_cache
from protocol.errors import Overloaded
from protocol.messages.leaving import RunningRequests

STILL_WITHIN_S = 30.0  # for requests that SGLang still tokenises, or whose grammars it compiles
RETRY_S = 0.02


class Standstill:
    """The standstill of one engine; `running` returns the ids of its requests."""

    def __init__(self, manager: TokenizerManager, running: Callable[[], Collection[str]]) -> None:
        self._manager = manager
        self._running = running
        self._names: set[str] = set()  # of what needs it

    @property
    def lasts(self) -> bool:
        """Whether the engine stands still, so that it takes no request."""
        return bool(self._names)

    async def begin(self, name: str, running: RunningRequests, within_s: float) -> None:
        """Let the engine stand still with an empty KV cache; raises `Overloaded` where requests forbid it.

        They do so unless they are to be held, and held ones once they have not let it for `within_s`. The scheduler
        itself has said that it is idle, apart from its queue: an operation that it would refuse by ending its process
        is safe from now on.
        """
        if self.lasts:
            self._names.add(name)
            return
        if self._running() and running is not RunningRequests.HOLD:
            raise Overloaded("requests run")
        self._names.add(name)  # from now on no request comes in
        now = asyncio.get_running_loop().time
        ends_at = now() + min(within_s, STILL_WITHIN_S)
        try:
            while (why_not := await self._try()) is not None:
                if now() > ends_at:
                    raise Overloaded(why_not)  # noqa: TRY301  # the name is given back here, too
                await asyncio.sleep(RETRY_S)
        except BaseException:
            self._names.discard(name)
            raise

    async def _try(self) -> str | None:
        """Try once; return why the engine goes on, None if it stands still."""
        if any(self._is_on_its_way(request_id) for request_id in self._running()):
            return "requests are on their way into the engine"
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            why_not = await prefix_cache.flush(self._manager)
        except BaseException:
            await self._go_on()
            raise
        if why_not is not None:  # a grammar is compiled only while the engine goes on
            await self._go_on()
        return why_not

    async def end(self, name: str) -> None:
        """End the need of a name; the engine goes on if it was the last one."""
        if name in self._names:
            self._names.discard(name)
            if not self._names:
                await self._go_on()

    async def _go_on(self) -> None:
        await self._manager.continue_generation(ContinueGenerationReqInput())

    def _is_on_its_way(self, request_id: str) -> bool:
        """Whether a request is not in the scheduler yet: SGLang would give it one that comes later all the same."""
        state = self._manager.rid_to_state.get(request_id)
        return state is None or not state.dispatched
