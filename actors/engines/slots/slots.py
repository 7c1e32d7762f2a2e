"""The slots of one rank of an engine, and the answer to a request in a slot: the common part of decode and prefill.

A slot is the right to have one request inside the engine. When the request ends, for any reason, it is aborted, and its
slot stays taken until the engine itself reports its release: if a slot were given to the next request too early, two
requests would use the same memory.

An engine may never report it. The slot is then stuck: it is not used, and waited for. One stuck slot may be the fault
of its request, so it costs that slot and no other stream. Several, or one in an engine without a reply to any request,
are the fault of the engine: `EngineStuck` ends the actor, and the supervisor starts the engine and the actor again. Not
so while the engine is held up by a compiler or a disk: its end would end the compiler, and its next life begin again.
Ranks have slots apart: the replies of the others must not hide a rank that stands still.

An engine that leaves service may hold its requests: then they *rest*, no deadline passes, and no slot is stuck.

An engine without requests has room for one *probe*, which yields to any request: a new request cancels it, and waits
for its slot only if there is no other.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import TypeAlias

import trio
from attrs import define, field

from actors.engines.outcomes import GenerateCall, log_outcome, report_outcome
from actors.engines.port import Engine, Generation
from actors.engines.slots.deadlines import Deadlines, Pace
from actors.engines.slots.kv_admission import KvAdmission
from actors.engines.slots.shared_prefixes import SharedPrefixes
from actors.kit.calls import BugCounter
from protocol.errors import DeadlineExceeded, EngineDied, EngineLost, EngineStuck, NotReady, Preempted, RequestError
from protocol.messages.generation import Generate, Started, Tokens

TURN_S = 0.05  # the longest time between replies that are handled in one turn

ReachPartner: TypeAlias = Callable[[bytes], Awaitable[None] | None]
"""Returns what waits until the partner of a hand-off is reached, None if that is known; it raises `HandOffFailed`."""

log = logging.getLogger(__name__)


@define(eq=False)
class SlotObserver:
    """Receives events of an engine's slots; this one ignores them."""

    def begun(self, request_id: str) -> None:
        """The first token of a request has come."""

    def ended(self, request: Generate, outcome: str, began_at: float, first_at: float | None) -> bool:  # noqa: ARG002
        """The answer to a request has ended, which had its slot at `began_at`; return whether its span is recorded."""
        return False

    def aborted(self, seconds: float) -> None:
        """The slot of a request whose asker has left is free again, `seconds` after the asker left."""

    def stuck(self, slots: int) -> None:
        """The number of stuck slots has changed."""


async def raise_when_lost(engine: Engine) -> None:
    """Raise `EngineDied` when the engine is lost, so that calls wait in the inbox for its next life."""
    await engine.wait_lost()
    raise EngineDied("the engine is lost")


def _ignore() -> None:
    pass


def _always() -> bool:
    return True


def from_the_start() -> float:
    """Return a moment before any."""
    return -inf


async def generate(
    call: GenerateCall,
    slots: Slots,
    bugs: BugCounter,
    on_begun: Callable[[], None] = _ignore,
    on_released: Callable[[], None] = _ignore,
    computable_from: Callable[[], float] = from_the_start,
) -> None:
    """Answer one call in a slot that the caller has acquired; release the slot once the engine has.

    `on_begun` is called at the first token, and again when the request has ended; `on_released` with the slot.
    `computable_from` returns the first moment at which the engine could compute the prompt: the deadlines count from
    there, if that is later than the submission.
    """
    slots.begin_request()
    pace = Pace(slots.deadlines, computable_from)

    def end_prefill(*, has_begun: bool) -> None:
        if slots.prefixes is not None:
            slots.prefixes.discard(call.request, has_begun=has_begun)
        on_begun()

    def pass_on(reply: Started | Tokens) -> None:
        now = slots.last_reply_at = trio.current_time()
        if isinstance(reply, Tokens):
            pace.last_at = now
            call.answer.put(reply, len(reply.ids))
            call.answer.extend_fast_path(generation, record)
        else:
            pace.started_at, pace.last_at, pace.handed_over = pace.began_at, now, bool(reply.hand_off)
            pace.first_at = now
            end_prefill(has_begun=True)
            slots.observer.begun(call.request.id)
            call.answer.put(reply, 0)

    def record(_: Sequence[int], last_at: float) -> None:
        pace.last_at = last_at
        slots.last_reply_at = max(slots.last_reply_at, last_at)

    try:
        with call.answering(bugs) as answer, report_outcome(call, partial(slots.report, call, pace)):
            if slots.probe is not None:
                await slots.replace_probe(slots.probe, pace)
            await slots.wait_for_others(call.request)
            async with slots.hold(call, pace) as generation:
                finished = await generation.relay(pass_on, pace.until)
                if finished is None:
                    late = Preempted if slots.is_preempted(pace) else DeadlineExceeded
                    raise late(f"the engine took longer than {pace.waited_for}")
            answer.end(finished)
    finally:
        end_prefill(has_begun=False)
    if call.request.id in slots.stuck:
        await slots.wait_released(call.request.id)
    slots.end_request()
    on_released()


@define(eq=False)
class Probe:
    """The probe of an idle engine: its scope, and the event of its release."""

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    over: trio.Event = field(factory=trio.Event)


@define(eq=False)
class Slots:
    """The slots of one rank of an engine: the number of free ones, the stuck ones, and the room in the KV memory.

    Requests are taken from an inbox only while the engine is `in_service`. The way of a slot:

        free -> acquired -> waits (probe leaves, shared prefix) -> submitted -> aborted -> released -> free
                                                                                  | `release_s` passes
                                                                                stuck -> released -> free
                                                                                  | the engine is at fault
                                                                               `EngineStuck`
    """

    engine: Engine
    number: int
    deadlines: Deadlines
    observer: SlotObserver = field(factory=SlotObserver)
    in_service: Callable[[], bool] = _always
    rank: int = 0
    memory: KvAdmission = field(factory=KvAdmission)
    prefixes: SharedPrefixes | None = None  # None: no request waits for another with the same beginning
    reach: ReachPartner | None = None  # None: its engine meets no partner, or reaches it without harm
    last_reply_at: float = -inf  # the last reply of the engine to any request
    stuck: dict[str, bool] = field(factory=dict)  # request ids of stuck slots; True if the engine was silent
    free: trio.Semaphore = field(init=False)
    probe: Probe | None = field(init=False, default=None)
    _held_up_at: float = field(init=False, default=-inf)  # when that was found last
    _generations: dict[Generation, Pace] = field(factory=dict)
    _rests_since: float | None = field(init=False, default=None)
    _requests: int = field(init=False, default=0)  # the number of requests with a slot
    _leaving: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    _idle_since: float = field(init=False, factory=trio.current_time)

    def __attrs_post_init__(self) -> None:
        self.free = trio.Semaphore(self.number)

    async def wait_for_others(self, request: Generate) -> None:  # noqa: ASYNC910  # `hold` has a checkpoint
        """Wait for a request that computes the same beginning, and until the partner of the hand-off is reached."""
        if self.prefixes is not None:
            await self.prefixes.wait(request, self.deadlines.first_token_s / 2)
        if self.reach is not None and (reaching := self.reach(request.hand_off)) is not None:
            await reaching

    @asynccontextmanager
    async def hold(self, call: GenerateCall, pace: Pace) -> AsyncIterator[Generation]:
        """Submit the request; leaving, for any reason, aborts it and waits up to `release_s` for its slot.

        If the slot is not free by then, the request fails, though not yet the engine: raises `EngineLost` (a crash for
        the router's count), or the pending `DeadlineExceeded` if only this request stands still. Raises `NotReady` if
        the engine has left service meanwhile.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self.in_service():
            raise NotReady("the engine is out of service")
        request = self.memory.with_engine_priority(call.request)
        generation = self.engine.submit(request)  # its id is ours, so it can be aborted from now on
        self._generations[generation] = pace
        late: DeadlineExceeded | None = None
        try:
            yield generation
        except DeadlineExceeded as error:
            late = error
            raise
        finally:
            # All of this is synchronous, so that a cancellation cannot come between: `abort` is idempotent, and a no-op
            # once the request has finished. Later replies are dropped: the call may end long before the slot is free.
            left_at = trio.current_time() if call.scope.cancel_called and not pace.handed_over else None
            silent = late is not None and self._silent_since(pace)
            self.engine.abort(request.id)
            del self._generations[generation]
            generation.abandon()
            with trio.move_on_after(self.deadlines.release_s, shield=True) as waiting:
                await self.engine.wait_released(request.id)
            if waiting.cancelled_caught:
                self.stuck[request.id] = silent
                if isinstance(late, Preempted):  # a preempted request gives its slot back
                    raise DeadlineExceeded(late.detail) from late
                if late is None or silent:
                    raise EngineLost(f"{request.id} kept its slot for {self.deadlines.release_s} s after its end")
            elif left_at is not None:
                self.observer.aborted(trio.current_time() - left_at)

    def report(self, call: GenerateCall, pace: Pace, outcome: str, seconds: float) -> None:
        """Report the outcome of a call `seconds` after it had its slot."""
        if not self.observer.ended(call.request, outcome, trio.current_time() - seconds, pace.first_at):
            log_outcome(call, "generation ended", outcome, seconds)

    def is_preempted(self, pace: Pace) -> bool:
        """Whether a begun request stands still while the engine continues others with its memory."""
        self._settle()
        last_at, total_s = pace.last_at, self.deadlines.total_s
        if last_at is None or trio.current_time() >= pace.started_at + total_s:
            return False
        return self.last_reply_at > last_at + self.deadlines.gap_s / 2

    def _silent_since(self, pace: Pace) -> bool:
        """Whether the engine has replied to no request since this one began to wait, at least one deadline ago.

        Replies in the turn in which it began to wait do not count.
        """
        self._settle()
        since = pace.waited_since
        longest_s = min(self.deadlines.first_token_s, self.deadlines.gap_s)
        return self.last_reply_at <= since + TURN_S and trio.current_time() >= since + longest_s

    def _settle(self) -> None:
        """Bring `last_reply_at` up to date."""
        for generation in self._generations:
            if generation.fast_path is not None:
                generation.fast_path.settle()

    # Requests out of the way of an operation -------------------------------------------

    @property
    def occupied(self) -> int:
        """The number of requests that have a slot, the probe among them."""
        return self._requests + (self.probe is not None)

    async def wait_empty(self) -> None:
        """Wait until no request has a slot."""
        await trio.lowlevel.checkpoint()
        while self.occupied:
            await self._leaving.park()

    def end_requests(self, why: str) -> None:
        """End the requests in the engine with `NotReady`, with which they go on at another worker."""
        for generation in self._generations:
            if not generation.over.is_set():
                generation.fail_relay(NotReady(why))

    def rest(self) -> None:
        """Stop the deadlines of the requests in the engine, which holds them; no slot is stuck meanwhile."""
        if self._rests_since is None:
            self._rests_since = trio.current_time()
        for pace in self._generations.values():
            pace.rests = True

    def end_rest(self) -> None:
        """Let the deadlines go on from where they were; no effect unless they rest."""
        if self._rests_since is None:
            return
        self._settle()
        for generation, pace in self._generations.items():
            pace.rests = False
            pace.postpone(self._rests_since)
            generation.recheck()
        self._rests_since = None

    # Requests and the probe ------------------------------------------------------------

    def begin_request(self) -> None:
        """Count a request that has been given a slot."""
        self._requests += 1

    def end_request(self) -> None:
        """Give the slot of a released request back."""
        self._requests -= 1
        self._idle_since = trio.current_time()
        self.free.release()
        self._leaving.unpark_all()

    @property
    def idle_since(self) -> float | None:
        """When the last request or probe left the engine; None while there is one, also a stuck one."""
        return None if self._requests or self.probe is not None else self._idle_since

    def begin_probe(self) -> Probe:
        """Give the idle engine its probe."""
        assert self.idle_since is not None, "an engine with requests is not probed"
        self.probe = Probe()
        return self.probe

    def end_probe(self) -> None:
        """Count the released probe as gone."""
        assert self.probe is not None
        self.probe.over.set()
        self.probe, self._idle_since = None, trio.current_time()
        self._leaving.unpark_all()

    def cancel_probe(self, reason: str) -> None:
        """Cancel the probe, if there is one."""
        if self.probe is not None:
            self.probe.scope.cancel(reason=reason)

    async def replace_probe(self, probe: Probe, pace: Pace) -> None:
        """Cancel the probe for a request, and wait until its slot is free if there is no other.

        Raises `DeadlineExceeded` if that takes longer than the request's first token may.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.cancel_probe("a request has come")
        if self._requests < self.number:
            return
        with trio.move_on_at(pace.until()) as waiting:
            await probe.over.wait()
        if waiting.cancelled_caught:
            raise DeadlineExceeded(f"the engine took longer than {pace.waited_for}")

    async def wait_released(self, request_id: str) -> None:
        """Wait for a stuck slot; raises `EngineStuck` once the engine is at fault."""
        await trio.lowlevel.checkpoint()
        limits = self.deadlines
        log.warning("an engine keeps a slot", extra={"request_id": request_id, "stuck": len(self.stuck)})
        self.observer.stuck(len(self.stuck))
        try:
            with trio.move_on_after(limits.leak_s) as leaking:
                await self._check_engine(request_id, leaking)
                while await self._is_stuck(request_id):
                    await self._check_engine(request_id, leaking)
        finally:
            del self.stuck[request_id]
            self.observer.stuck(len(self.stuck))
        if leaking.cancelled_caught:
            raise EngineStuck(f"{request_id} kept its slot for {limits.leak_s} s after its end")

    async def _is_stuck(self, request_id: str) -> bool:
        with trio.move_on_after(self.deadlines.release_s) as waiting:
            await self.engine.wait_released(request_id)
        return waiting.cancelled_caught

    async def held_up(self) -> bool:
        """Whether the engine reports that it waits for a compiler or a disk, so that it can release no slot for now."""
        with trio.move_on_after(self.deadlines.release_s), suppress(RequestError):  # a lost engine ends this actor
            return await self.engine.held_up()
        return False  # noqa: ASYNC910  # the engine was asked

    async def _check_engine(self, request_id: str, leaking: trio.CancelScope) -> None:
        """Raise `EngineStuck` if the engine is at fault; while it is held up, the time of the leak begins anew."""
        await trio.lowlevel.checkpoint()
        limits, stuck_max = self.deadlines, min(self.deadlines.stuck_max, self.number)
        if self._rests_since is not None or await self.held_up():
            self._held_up_at = trio.current_time()
            leaking.deadline = self._held_up_at + limits.leak_s
        if trio.current_time() < self._held_up_at + 2 * limits.release_s:  # what has held it up may just have ended
            return
        if len(self.stuck) >= stuck_max:
            raise EngineStuck(f"{len(self.stuck)} requests kept their slots for {limits.release_s} s after their ends")
        if self.stuck[request_id]:
            raise EngineStuck(f"{request_id} kept its slot, and the engine answers no request")
        with trio.move_on_after(limits.release_s) as asking, suppress(RequestError):  # a lost engine ends this actor
            await self.engine.load()
        if asking.cancelled_caught:
            raise EngineStuck(f"{request_id} kept its slot, and the engine does not report its load")
