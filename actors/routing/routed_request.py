"""One request on its way: both legs asked at once, and carried on with somebody else when a worker is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, evolve, field

from actors.kit.groups import leaves
from actors.routing.ports import Replies, Worker
from actors.routing.rebalancing import UnstartedRequests
from actors.routing.route import Route, Routing
from protocol.errors import (
    ActorLost,
    AskerLeft,
    DeadlineExceeded,
    Draining,
    EngineLost,
    EngineRefused,
    HandOffFailed,
    InternalError,
    LinkLost,
    NotReady,
    Overloaded,
    Preempted,
    RequestError,
)
from protocol.messages import Finished, FinishReason, Generate, Rendezvous, Sampling, Started, Tokens, Usage
from protocol.trace import child_span

ELSEWHERE = (ActorLost, Draining, EngineLost, HandOffFailed, LinkLost, NotReady, Overloaded, Preempted)
"""What ends a request here and need not end it elsewhere: the worker is to blame, or its host, or the way to it."""
MOVED = "moved"
"""Why a request goes on elsewhere that was taken back before it had begun."""


@define(eq=False)
class RoutedRequest:
    """One request on its way, with one worker after the other if need be; whoever asked sees one unbroken answer."""

    request: Generate
    answer: Replies
    routing: Routing
    unstarted: UnstartedRequests
    route: Route = field(init=False)  # where it is
    moves: int = 0
    _moved_to: Route | None = None
    _asking: trio.CancelScope = field(factory=trio.CancelScope)
    _again: bool = False  # somebody has been asked before, who may not have let go of its id
    _sent: list[int] = field(factory=list)
    _before: int = 0  # tokens that were sent before the worker that is being asked
    _first: Route | None = None  # the one that began the answer
    _weights: str | None = None  # of those who have begun the answer
    _handed: Route | None = None  # the last one whose prefill has done its part
    _cached: int | None = None  # tokens of the prompt, as that one said; where there are two, the prefill knows
    _lost: set[str] = field(factory=set)
    _dead: set[str] = field(factory=set)  # whose engine died under this request: it is not given to them again
    _left: list[tuple[str, Replies]] = field(factory=list)  # legs that were left before they had ended
    _refused: tuple[str, EngineRefused] | None = None  # by whom
    _opinions: int = 0  # that were asked for
    _losses: int = 0
    _preemptions: int = 0
    _drains: int = 0
    _crashes: int = 0
    _pause_s: float = 0.0  # before one that was lost is asked again

    async def run(self, route: Route | None) -> Finished:
        """Return the result; raises the `RequestError` of the last worker if nobody can go on."""
        self.route = route or await self.routing.wait_for(self.remaining)
        try:
            while (finished := await self._try()) is None:
                self._again = True
            return finished
        finally:
            if self._moved_to is not None:
                self._moved_to.end()

    @property
    def remaining(self) -> Generate:
        """The request as it stands: what was sent is part of its prompt."""
        sampling, sent = self.request.sampling, self._sent
        if not sent:
            return self.request
        return evolve(
            self.request,
            tokens=[*self.request.tokens, *sent],
            said=self.request.said + len(sent),
            sampling=evolve(
                sampling,
                tokens_max=sampling.tokens_max - len(sent),
                tokens_min=max(0, sampling.tokens_min - len(sent)),
            ),
        )

    @property
    def avoided(self) -> set[str]:
        """The workers that it is not to move to: those that it is with, and those that died under it."""
        return {*self.route.names, *self._dead}

    def move(self, route: Route) -> None:
        """Leave the worker that has not begun, and ask another; what comes from now on comes too late."""
        self.moves += 1
        self._moved_to = route
        self._asking.cancel(reason="it can begin at once elsewhere")

    async def _try(self) -> Finished | None:
        """Ask once, and return the result, or None with another `route` to ask; raises what nobody can mend."""
        lost: RequestError | None = None
        try:
            with trio.CancelScope() as self._asking:
                finished = await self._ask(self.route)
                if self._moved_to is None:
                    return self._whole(finished)
        except RequestError as error:
            lost = error
        finally:
            self.unstarted.discard(self)
        await trio.lowlevel.checkpoint()
        if self._moved_to is not None:
            self.route, self._moved_to = self._moved_to, None
            self.routing.watch.call_resumed(MOVED, len(self._sent))
            return None
        assert lost is not None  # it was neither moved nor answered
        if (other := self._second_opinion(self.route, lost)) is not None:
            self.route = other
            return None
        if not isinstance(lost, ELSEWHERE):
            raise lost
        if (ended := self._ended()) is not None:
            return ended
        self.route = await self._elsewhere(lost)
        self.routing.watch.call_resumed(lost.code, len(self._sent))
        return None

    # One worker, or two ------------------------------------------------------------------

    async def _ask(self, route: Route) -> Finished:
        """Ask both legs at once: the failure of either ends the other in the same turn."""
        self._before = len(self._sent)
        if self._first is None:
            self._cached, self._weights = None, self.routing.pool.weights()
        try:
            request = self._continued() if self._again else self.request
            self.unstarted.add(self)
            if route.prefill is None:
                return await self._decode(route, request)
            async with trio.open_nursery() as legs:
                request = evolve(request, rendezvous=self._rendezvous(route.prefill))
                legs.start_soon(self._prefill, route, route.prefill, request)
                finished = await self._decode(route, request)
                legs.cancel_scope.cancel(reason="the decode has ended")
        except BaseExceptionGroup as group:
            failed, rest = group.split(RequestError)
            if failed is None:
                raise
            # Whoever moves the request, or has left, does so whatever becomes of a leg meanwhile; so does a bug.
            raise (rest or _gravest(failed)) from None
        finally:
            route.end()
        return finished

    async def _decode(self, route: Route, request: Generate) -> Finished:
        def pass_on(reply: Started | Tokens) -> None:
            if self._moved_to is not None:
                return
            if isinstance(reply, Tokens):
                self._sent += reply.ids
                self.answer.put(reply, len(reply.ids))
                return
            self.unstarted.discard(self)
            self._handed_over(route)
            route.begun()
            route.decode.begun(request.id)
            if self._first is None:
                self._first = route
                self._acquit()
                self._cached = reply.cached_tokens if self._cached is None else self._cached
                self.answer.put(Started(self._cached), 0)

        async with self._asked(route, route.decode, request) as replies:
            finished = await replies.relay(pass_on)
        assert finished is not None  # nobody here has had enough
        return finished

    async def _prefill(self, route: Route, prefill: Worker, request: Generate) -> None:
        def note(reply: Started | Tokens) -> None:
            if isinstance(reply, Started):
                route.begun()
                prefill.begun(request.id)
                if self._first is None or self._first is route:
                    self._cached = reply.cached_tokens

        async with self._asked(route, prefill, request) as replies:
            await replies.relay(note)

    @asynccontextmanager
    async def _asked(self, route: Route, worker: Worker, request: Generate) -> AsyncIterator[Replies]:
        name = worker.load.name
        with self._watched(route, worker):
            async with route.ask(worker, self._of_leg(request)) as replies:
                try:
                    yield replies
                finally:
                    if not replies.over.is_set():
                        self._left.append((name, replies))

    def _of_leg(self, request: Generate) -> Generate:
        """Return what one leg is asked; where the trace is followed, it has a span of its own."""
        if request.trace is None or not request.trace.followed:
            return request
        return evolve(request, trace=child_span(request.trace, self.routing.new_id()))

    def _rendezvous(self, prefill: Worker) -> Rendezvous:
        if prefill.bootstrap is None:  # it was there when the prefill was chosen
            self._lost.add(prefill.load.name)
            raise HandOffFailed(f"prefill {prefill.load.name} does not say any more where its rendezvous is")
        return Rendezvous(self.routing.new_room(), *prefill.bootstrap)

    @contextmanager
    def _watched(self, route: Route, worker: Worker) -> Iterator[None]:
        """Say how the call in the body ends, and blame the worker if it fails."""
        name, outcome = worker.load.name, AskerLeft.code
        try:
            yield
            outcome = "ended"
            if worker is route.decode:
                self._handed_over(route)
                self.routing.answered(name)
        except RequestError as error:
            outcome = error.code
            self._blame(route, worker, error)
            raise
        finally:
            self.routing.watch.called(name, outcome)

    def _handed_over(self, route: Route) -> None:
        """Note that a prefill has done its part: its decode says so, while itself it only knows what it has sent."""
        if route.prefill is not None and self._handed is not route:
            self._handed = route
            self.routing.answered(route.prefill.load.name)
            self.routing.answered(route.name)

    def _blame(self, route: Route, worker: Worker, error: RequestError) -> None:
        # Nobody knows which leg it is that lets the other wait until either's time is over.
        unmet = isinstance(error, DeadlineExceeded) and not isinstance(error, Preempted) and self._handed is not route
        if isinstance(error, HandOffFailed) or (unmet and route.prefill is not None):
            self.routing.failed(route.name, error)
        elif isinstance(error, DeadlineExceeded | InternalError) and not isinstance(error, Preempted):
            self.routing.failed(worker.load.name, error)
        elif isinstance(error, EngineRefused) and self._refused is None:
            self._refused = worker.load.name, error
        if isinstance(error, EngineLost):
            self._dead.add(worker.load.name)
        self._lost.add(worker.load.name)
        if isinstance(error, HandOffFailed) and route.prefill is not None:  # which of the two is at fault, nobody knows
            self._lost |= {route.decode.load.name, route.prefill.load.name}

    def _second_opinion(self, route: Route, error: RequestError) -> Route | None:
        """Return whom to ask at once where it is not plain whose fault an error is; None if it is, or nobody can.

        What an engine refuses may be wrong, or the engine; what fails on one that is tried again is not lost for that.
        """
        tried = bool(route.tries) and isinstance(error, DeadlineExceeded | InternalError)
        if self._sent or self._opinions or not (tried or isinstance(error, EngineRefused)):
            return None
        other = self.routing.choose(self.remaining, {*self._lost, *self._dead, *route.names})
        if other is not None:
            self._opinions += 1
            self.routing.watch.call_resumed(error.code, 0)
        return other

    def _acquit(self) -> None:
        """Blame the engine that refused this request, since another has begun to answer it."""
        if self._refused is not None:
            self.routing.failed(*self._refused)
            self._refused = None

    # Another one -------------------------------------------------------------------------

    def _continued(self) -> Generate:
        """Return what is left to do, under another id: the worker that was lost may not have let go of the first."""
        return evolve(self.remaining, id=self.routing.new_id())

    def _ended(self) -> Finished | None:
        """Return the result if every token has been sent, and only the word that it was the last one was lost."""
        sampling, sent = self.request.sampling, self._sent
        if not sent:
            return None
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.routing.ends)
        if sent[-1] in stops and len(sent) > sampling.tokens_min:
            return self._finished(FinishReason.STOP, sent[-1], len(sent))
        return self._finished(FinishReason.LENGTH, None, len(sent)) if len(sent) >= sampling.tokens_max else None

    async def _elsewhere(self, lost: RequestError) -> Route:
        """Wait for another route; raises what the worker was lost with if the rest could differ, or nobody comes."""
        limits, sent = self.routing.limits, len(self._sent)
        unready, planned = isinstance(lost, NotReady), is_planned(lost)
        self._preemptions += isinstance(lost, Preempted)
        self._drains += planned
        self._losses += not (unready or planned)  # unready: nothing was begun there, and it will be back
        self._pause_s = min(2 * self._pause_s, limits.pause_max_s) if unready and self._pause_s else limits.pause_s
        if self._losses > limits.resumes_max or self._drains > limits.drains_max or sent > limits.resume_tokens_max:
            raise lost
        if self._preemptions > limits.preemptions_max:
            raise lost
        if sent and not resumes_exactly(self.request.sampling):
            self.routing.watch.call_not_resumed(lost.code)
            raise lost
        self._crashes += isinstance(lost, EngineLost)
        if self._losses > 1 and self._crashes + len(self._left) > limits.crashes_max:
            await self._count_stuck(limits.resume_s)
        dead = self._crashes > limits.crashes_max or not self.routing.others(self._dead)
        if self._crashes and dead:
            raise lost
        with trio.move_on_after(limits.resume_s):
            route = await self.routing.wait_for_other(self.remaining, self._lost, self._dead, self._pause_s)
            if not (sent and self._weights not in {None, self.routing.pool.weights()}):
                return route
            route.end()  # the rest would be of another model than what was sent
        raise lost

    async def _count_stuck(self, within_s: float) -> None:
        """Count as crashes the engines that this request was taken from, and that do not let go of it."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(within_s):
            async with trio.open_nursery() as waiting:
                for _, replies in self._left:
                    waiting.start_soon(replies.over.wait)
        for name, replies in self._left:
            if not replies.over.is_set() or isinstance(replies.failure, EngineLost):
                self._dead.add(name)
                self._crashes += 1
        self._left.clear()

    def _whole(self, finished: Finished) -> Finished:
        """Return the result as if one worker had computed all of it."""
        return self._finished(finished.reason, finished.matched, self._before + finished.usage.completion_tokens)

    def _finished(self, reason: FinishReason, matched: str | int | None, completion_tokens: int) -> Finished:
        return Finished(reason, Usage(len(self.request.tokens), completion_tokens, self._cached or 0), matched)


def is_planned(lost: RequestError) -> bool:
    """Whether nothing failed where a worker was lost: its node drains, or its link made room for a newer one."""
    return isinstance(lost, Draining) or (isinstance(lost, LinkLost) and type(lost) is not LinkLost)


def resumes_exactly(sampling: Sampling) -> bool:
    """Whether the next token depends on nothing but the prompt and the tokens that were sent.

    A grammar is at a place that another engine does not know; what a penalty counts, `said` tells it.
    """
    return sampling.grammar is None


def _gravest(group: BaseExceptionGroup[RequestError]) -> RequestError:
    """Return the error that says most: a worker's own rather than what the other leg makes of it."""
    errors = [leaf for leaf in leaves(group) if isinstance(leaf, RequestError)]
    return min(errors, key=lambda each: (isinstance(each, ELSEWHERE), isinstance(each, HandOffFailed)))
