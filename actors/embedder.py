"""Embedder: texts to vectors, and pairs to scores, by one engine, for so many requests at a time.

The engine makes its batches over all requests that it has, so this actor makes none: it takes a call when it has a
slot for it. The others wait in the inbox, where keys take turns by the tokens that they ask for. A slot is free when
the engine has released the request, however that has ended. Nothing is retried here: the router asks another embedder.
"""

from __future__ import annotations

import trio
from attrs import define, field

from actors.engines.embedding.limits import EmbedderLimits, EmbedderObserver
from actors.engines.embedding.port import Embedder, VectorsAnswer
from actors.engines.outcomes import log_outcome, report_outcome
from actors.kit.calls import BugCounter, Call
from actors.kit.priority_inbox import PriorityInbox
from protocol.errors import BadRequest, DeadlineExceeded, EngineDied, EngineStuck
from protocol.messages.embedding import Embed, Vectors

LOST_S = 1.0
"""The longest wait for the failures of a lost engine's requests, so that their askers count a crash."""


async def embedder(
    inbox: PriorityInbox[Embed, Vectors, Vectors],
    engine: Embedder,
    slots: int,
    limits: EmbedderLimits,
    observer: EmbedderObserver | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Have at most `slots` requests computed at a time; further calls wait in the inbox.

    Raises `EngineDied` when the engine is lost, `EngineStuck` when it keeps a request that has ended.
    """
    free, bugs = trio.Semaphore(slots), BugCounter()
    requests = _Requests(engine, limits, observer or EmbedderObserver())

    async def answer_one(call: Call[Embed, Vectors, Vectors]) -> None:
        await requests.answer(call, bugs)
        free.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_raise_when_lost, engine, requests)
        task_status.started()
        with requests.taking:
            while True:
                await free.acquire()
                nursery.start_soon(answer_one, await inbox.receive())
        await trio.sleep_forever()


@define(eq=False)
class _Requests:
    """The requests that an engine has."""

    engine: Embedder
    limits: EmbedderLimits
    observer: EmbedderObserver
    running: dict[str, VectorsAnswer] = field(factory=dict)  # until they are released
    taking: trio.CancelScope = field(factory=trio.CancelScope)  # until the engine is lost

    async def answer(self, call: Call[Embed, Vectors, Vectors], bugs: BugCounter) -> None:
        """Answer a call, and wait until the engine has released its request."""
        request, left = call.request, False
        given: VectorsAnswer | None = None

        def report(outcome: str, seconds: float) -> None:
            if not self.observer.ended(request, outcome, trio.current_time() - seconds):
                log_outcome(call, "embedding ended", outcome, seconds)
            self.observer.request_ended(request, outcome, seconds)

        with call.answering(bugs) as answer, report_outcome(call, report):
            if request.id in self.running:  # of another node
                raise BadRequest(f"the request {request.id} is being computed already")
            given = self.running[request.id] = self.engine.submit(request)
            try:
                answer.end(await self._result(given))
            finally:
                left = not given.over.is_set()
                self.engine.abort(request.id)
        if given is not None:
            await self._released(request.id, left)

    async def _released(self, request_id: str, left: bool) -> None:
        """Wait until the engine has released a request that has ended, or was `left` before."""
        ended_at = trio.current_time()
        with trio.move_on_after(self.limits.release_s) as waiting:
            await self.engine.wait_released(request_id)
        if waiting.cancelled_caught:
            raise EngineStuck(f"it kept a request {self.limits.release_s:g} s after its end")
        del self.running[request_id]
        if left:
            self.observer.aborted(trio.current_time() - ended_at)

    async def _result(self, given: VectorsAnswer) -> Vectors:
        with trio.move_on_after(self.limits.computing_s):
            result = await given.result()
            assert result is not None  # it ends with a result or an error
            return result
        raise DeadlineExceeded(f"its vectors took more than {self.limits.computing_s:g} s")


async def _raise_when_lost(engine: Embedder, requests: _Requests) -> None:
    """Raise `EngineDied` when the engine is lost, so that calls wait in the inbox for its next life.

    The running calls fail with `EngineLost` first: their askers count a crash.
    """
    await engine.wait_lost()
    requests.taking.cancel(reason="the engine is lost")
    with trio.move_on_after(LOST_S):
        await trio.lowlevel.checkpoint()
        for answer in list(requests.running.values()):
            await answer.over.wait()
    raise EngineDied("the engine is lost")
