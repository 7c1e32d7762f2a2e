"""Decode: turn token ids into streams of further token ids, one engine slot a request."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, field, frozen

from actors._kit import Bugs, Call, Inbox
from actors.engines.port import Engine, Generation
from protocol.errors import ActorLost, DeadlineExceeded, EngineDied, EngineStuck, Internal, Left, RequestError
from protocol.messages import Finished, Generate, Started, Tokens
from protocol.trace import fields

log = logging.getLogger(__name__)


@frozen
class Deadlines:
    """How long an engine may take: to a request's first token, from one to the next, for all of it, to free a slot."""

    first_token_s: float = 60.0
    gap_s: float = 20.0
    total_s: float = 600.0
    release_s: float = 5.0


async def decode(
    inbox: Inbox[Call[Generate, Started | Tokens, Finished]],
    engine: Engine,
    slots: int,
    deadlines: Deadlines,
    aborted: Callable[[float], None] = lambda _: None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve generations, at most `slots` at a time; what an engine cannot take yet waits in the inbox.

    Several may share one inbox: whoever has a slot takes the next call. `aborted` hears of each request whose asker
    left how long its slot was kept from then on, in seconds. Raises `EngineDied` when the engine is lost.
    """
    free = trio.Semaphore(slots)
    bugs = Bugs()
    async with trio.open_nursery() as requests:
        requests.start_soon(_end_with, engine)
        task_status.started()
        while True:
            await free.acquire()  # the slot first: a call that must wait had better wait where others can take it
            call = await inbox.receive()
            requests.start_soon(_generate, call, engine, free, deadlines, bugs, aborted)


async def _end_with(engine: Engine) -> None:
    """End this actor with its engine, so that what comes now waits in the inbox for the next one."""
    await engine.wait_lost()
    raise EngineDied("the engine is lost")


async def _generate(
    call: Call[Generate, Started | Tokens, Finished],
    engine: Engine,
    free: trio.Semaphore,
    deadlines: Deadlines,
    bugs: Bugs,
    aborted: Callable[[float], None],
) -> None:
    pace = _Pace(deadlines)

    def pass_on(reply: Started | Tokens) -> None:
        pace.heard()
        call.answer.put(reply, len(reply.ids) if isinstance(reply, Tokens) else 0)

    try:
        with call.answering(bugs) as answer, _told(call):
            async with _slot(engine, call, deadlines.release_s, aborted) as generation:
                finished = await generation.relay(pass_on, pace.until)
                if finished is None:
                    raise DeadlineExceeded(f"the engine took longer than {pace.waited_for}")
            answer.end(finished)
    finally:
        free.release()


@asynccontextmanager
async def _slot(
    engine: Engine,
    call: Call[Generate, Started | Tokens, Finished],
    release_s: float,
    aborted: Callable[[float], None],
) -> AsyncIterator[Generation]:
    """Own one engine slot. Leaving, by any road, aborts and waits for it back."""
    await trio.lowlevel.checkpoint_if_cancelled()
    request = call.request
    generation = engine.submit(request)  # we chose its id, so it can be aborted from now on
    try:
        yield generation
    finally:
        left_at = trio.current_time() if call.scope.cancel_called else None
        engine.abort(request.id)  # synchronous, idempotent, a no-op once finished
        with trio.move_on_after(release_s, shield=True) as waiting:
            await engine.wait_released(request.id)
        if waiting.cancelled_caught:
            raise EngineStuck(f"{request.id} kept its slot for {release_s} s after its end")
        if left_at is not None:
            aborted(trio.current_time() - left_at)


@contextmanager
def _told(call: Call[Generate, Started | Tokens, Finished]) -> Iterator[None]:
    """Log how the body answers a call whose trace is followed: the asker's node cannot say what went on here."""
    outcome, began_at, trace = "", trio.current_time(), call.request.trace
    try:
        yield
        outcome = "ended"
    except RequestError as error:
        outcome = error.code
        raise
    except Exception:
        outcome = Internal.code
        raise
    finally:
        if trace is not None and trace.followed:
            cancelled = Left.code if call.scope.cancel_called else ActorLost.code
            line = {"request_id": call.request.id, **fields(trace), "outcome": outcome or cancelled}
            log.info("generation ended", extra={**line, "took_s": round(trio.current_time() - began_at, 4)})


@define(eq=False)
class _Pace:
    """When to stop waiting for an engine, as a function of what it has said so far."""

    deadlines: Deadlines
    started_at: float = field(factory=trio.current_time)
    last_at: float | None = None

    def heard(self) -> None:
        self.last_at = trio.current_time()

    def until(self) -> float:
        total = self.started_at + self.deadlines.total_s
        if self.last_at is None:
            return min(total, self.started_at + self.deadlines.first_token_s)
        return min(total, self.last_at + self.deadlines.gap_s)

    @property
    def waited_for(self) -> str:
        if trio.current_time() >= self.started_at + self.deadlines.total_s:
            return f"{self.deadlines.total_s} s in all"
        if self.last_at is None:
            return f"{self.deadlines.first_token_s} s to its first token"
        return f"{self.deadlines.gap_s} s from one token to the next"
