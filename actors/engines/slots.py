"""The slots of an engine: what a decode and a prefill have in common.

A slot is the right to one request inside an engine. Who owns one and leaves, for whatever reason, has the request
aborted and keeps the slot until the engine itself says that it is free: a slot that is given on too early is two
requests in the memory of one. An engine may never say so. Then the slot is set aside, and when several are, or the
engine says nothing to anybody, the engine is at fault, its actor ends, and the supervisor starts both anew.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf

import trio
from attrs import define, field, frozen

from actors.engines.port import Engine, Generation
from actors.kit.calls import BugCounter, Call
from protocol.errors import (
    ActorLost,
    AskerLeft,
    DeadlineExceeded,
    EngineDied,
    EngineLost,
    EngineStuck,
    InternalError,
    Preempted,
    RequestError,
)
from protocol.messages import Finished, Generate, Started, Tokens
from protocol.trace import fields

log = logging.getLogger(__name__)


@frozen
class Deadlines:
    """How long an engine may take: to a request's first token, from one to the next, for all of it, to free a slot.

    A slot that was not freed in `release_s` is set aside and waited for; after `leak_s`, or as soon as there are
    `stuck_max` of them, or all, the engine is at fault.
    """

    first_token_s: float = 60.0
    gap_s: float = 20.0
    total_s: float = 600.0
    release_s: float = 5.0
    leak_s: float = 300.0
    stuck_max: int = 4


@define(eq=False)
class SlotObserver:
    """Who hears what becomes of an engine's slots; this one forgets it."""

    def aborted(self, seconds: float) -> None:
        """Hear how long a slot was kept after its asker had left."""

    def stuck(self, slots: int) -> None:
        """Hear how many slots are set aside now."""


async def end_with(engine: Engine) -> None:
    """End an actor with its engine, so that what comes now waits in the inbox for the next one."""
    await engine.wait_lost()
    raise EngineDied("the engine is lost")


def _nothing() -> None:
    pass


async def generate(
    call: Call[Generate, Started | Tokens, Finished],
    slots: Slots,
    bugs: BugCounter,
    begun: Callable[[], None] = _nothing,
) -> None:
    """Answer one call in a slot that is its own, and free the slot when the engine has.

    `begun` is called at its first token, and when the engine has nothing of it any more.
    """
    pace = _Pace(slots.deadlines)

    def pass_on(reply: Started | Tokens) -> None:
        slots.heard_at = pace.last_at = trio.current_time()
        if isinstance(reply, Tokens):
            call.answer.put(reply, len(reply.ids))
        else:
            begun()
            call.answer.put(reply, 0)

    try:
        with call.answering(bugs) as answer, _told(call):
            async with slots.one(call, pace) as generation:
                finished = await generation.relay(pass_on, pace.until)
                if finished is None:
                    late = Preempted if slots.passes_over(pace) else DeadlineExceeded
                    raise late(f"the engine took longer than {pace.waited_for}")
            answer.end(finished)
    finally:
        begun()
    if call.request.id in slots.kept:
        await slots.wait_given_back(call.request.id)
    slots.free.release()


@define(eq=False)
class Slots:
    """The slots of one engine: how many are free, and which it has not given back in time.

    One of those may be its request's fault, so it costs a slot and no other stream; several, or one of an engine that
    says nothing to anybody, are the engine's.
    """

    engine: Engine
    number: int
    deadlines: Deadlines
    observer: SlotObserver
    heard_at: float = -inf  # when the engine last had something to say, to whomever
    kept: dict[str, bool] = field(factory=dict)  # the requests of those set aside, and whether the engine was silent
    free: trio.Semaphore = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.free = trio.Semaphore(self.number)

    @asynccontextmanager
    async def one(self, call: Call[Generate, Started | Tokens, Finished], pace: _Pace) -> AsyncIterator[Generation]:
        """Own one slot. Leaving, by any road, aborts and waits for it back, `release_s` at the longest.

        A slot that is not back by then fails its request before the engine: raises `EngineLost`, so that whoever
        carries requests on counts it, or the `DeadlineExceeded` that was on its way if only this request stands still.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        request = call.request
        generation = self.engine.submit(request)  # we chose its id, so it can be aborted from now on
        late: DeadlineExceeded | None = None
        try:
            yield generation
        except DeadlineExceeded as error:
            late = error
            raise
        finally:
            left_at = trio.current_time() if call.scope.cancel_called else None
            silent = late is not None and self._silent_since(pace)
            self.engine.abort(request.id)  # synchronous, idempotent, a no-op once finished
            generation.abandon()  # what comes now comes too late: the call may be over long before the slot is free
            with trio.move_on_after(self.deadlines.release_s, shield=True) as waiting:
                await self.engine.wait_released(request.id)
            if waiting.cancelled_caught:
                self.kept[request.id] = silent
                if isinstance(late, Preempted):  # it is more than that
                    raise DeadlineExceeded(late.detail) from late
                if late is None or silent:
                    raise EngineLost(f"{request.id} kept its slot for {self.deadlines.release_s} s after its end")
            elif left_at is not None:
                self.observer.aborted(trio.current_time() - left_at)

    def passes_over(self, pace: _Pace) -> bool:
        """Whether an answer that has begun stands still while the engine goes on with others: its memory is theirs."""
        last_at, total_s = pace.last_at, self.deadlines.total_s
        if last_at is None or trio.current_time() >= pace.started_at + total_s:
            return False
        return self.heard_at > last_at + self.deadlines.gap_s / 2

    def _silent_since(self, pace: _Pace) -> bool:
        """Whether nobody has heard anything for as long as this request has waited in vain, which was long enough."""
        since = pace.waited_since
        longest_s = min(self.deadlines.first_token_s, self.deadlines.gap_s)
        return self.heard_at <= since and trio.current_time() >= since + longest_s

    async def wait_given_back(self, request_id: str) -> None:
        """Wait on for a slot that was not freed in time; raises `EngineStuck` once that is the engine's fault."""
        await trio.lowlevel.checkpoint()
        limits = self.deadlines
        log.warning("an engine keeps a slot", extra={"request_id": request_id, "stuck": len(self.kept)})
        self.observer.stuck(len(self.kept))
        try:
            with trio.move_on_after(limits.leak_s) as leaking:
                await self._check_engine(request_id)
                while await self._keeps(request_id):
                    await self._check_engine(request_id)
        finally:
            del self.kept[request_id]
            self.observer.stuck(len(self.kept))
        if leaking.cancelled_caught:
            raise EngineStuck(f"{request_id} kept its slot for {limits.leak_s} s after its end")

    async def _keeps(self, request_id: str) -> bool:
        with trio.move_on_after(self.deadlines.release_s) as waiting:
            await self.engine.wait_released(request_id)
        return waiting.cancelled_caught

    async def _check_engine(self, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        limits, most = self.deadlines, min(self.deadlines.stuck_max, self.number)
        if len(self.kept) >= most:
            raise EngineStuck(f"{len(self.kept)} requests kept their slots for {limits.release_s} s after their ends")
        if self.kept[request_id]:
            raise EngineStuck(f"{request_id} kept its slot, and the engine says nothing to anybody")
        with trio.move_on_after(limits.release_s) as asking, suppress(RequestError):  # a lost one ends this actor
            await self.engine.load()
        if asking.cancelled_caught:
            raise EngineStuck(f"{request_id} kept its slot, and the engine does not say how busy it is")


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
        outcome = InternalError.code
        raise
    finally:
        if trace is not None and trace.followed:
            cancelled = AskerLeft.code if call.scope.cancel_called else ActorLost.code
            line = {"request_id": call.request.id, **fields(trace), "outcome": outcome or cancelled}
            log.info("generation ended", extra={**line, "took_s": round(trio.current_time() - began_at, 4)})


@define(eq=False)
class _Pace:
    """When to stop waiting for an engine, as a function of what it has said so far."""

    deadlines: Deadlines
    started_at: float = field(factory=trio.current_time)
    last_at: float | None = None

    def until(self) -> float:
        total = self.started_at + self.deadlines.total_s
        if self.last_at is None:
            return min(total, self.started_at + self.deadlines.first_token_s)
        return min(total, self.last_at + self.deadlines.gap_s)

    @property
    def waited_since(self) -> float:
        return self.started_at if self.last_at is None else self.last_at

    @property
    def waited_for(self) -> str:
        if trio.current_time() >= self.started_at + self.deadlines.total_s:
            return f"{self.deadlines.total_s} s in all"
        if self.last_at is None:
            return f"{self.deadlines.first_token_s} s to its first token"
        return f"{self.deadlines.gap_s} s from one token to the next"
