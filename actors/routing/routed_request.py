"""One request on its way through its workers: both legs asked at once, and failover when a worker is lost.

A request is one *attempt* after the other, each on a `Route`: one worker, or a prefill and a decode in one nursery, in
which the failure of either leg ends the other. The asker sees one unbroken answer. What makes that possible is that the
tokens which were sent are known: the next attempt has them at the end of its prompt, under another id, and computes
only the rest. It is exact where the next token depends on the tokens before it alone.

Whether a request goes on depends on what it was lost with. `FAILOVER` names the errors that a worker, its node or the
link may be to blame for. Losses are counted by cause, since a request may also be the cause: one that crashes engines
must not be given to all of them. Anything else is the request's own error and ends it. How workers are chosen is the
matter of `Routing`, not of this file; and no error is hidden: what cannot be mended is raised as it came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, evolve, field

from actors.kit.groups import leaves
from actors.routing.ports import Replies, Worker
from actors.routing.rebalancing import UnstartedRequests
from actors.routing.route import Route
from actors.routing.routing import Routing
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

FAILOVER = (ActorLost, Draining, EngineLost, HandOffFailed, LinkLost, NotReady, Overloaded, Preempted)
"""Errors after which a request goes on with another worker: that worker, its node or the link to it may be to blame."""
MOVED = "moved"
"""The reason that is observed for a request that was moved before it had begun."""


@define(eq=False)
class RoutedRequest:
    """One request: its attempts with one worker after the other, and its one unbroken answer."""

    request: Generate
    answer: Replies
    routing: Routing
    unstarted: UnstartedRequests
    route: Route = field(init=False)  # of the current attempt
    moves: int = 0  # before it had begun, as `move` does
    _moved_to: Route | None = None
    _asking: trio.CancelScope = field(factory=trio.CancelScope)
    _asked_before: bool = False  # an earlier worker may still hold something under its id
    _sent: list[int] = field(factory=list)
    _sent_before: int = 0  # tokens sent before the current attempt
    _first_route: Route | None = None  # of the first attempt that began to answer
    _weights: str | None = None  # of the workers of that attempt
    _handed_route: Route | None = None  # the last one whose hand-off succeeded
    _cached: int | None = None  # tokens of the prompt found in the cache; of a pair, by its prefill
    _lost_names: set[str] = field(factory=set)  # workers that it was lost by
    _crashed_names: set[str] = field(
        factory=set
    )  # workers whose engine crashed under it: it is not given to them again
    _left_legs: list[tuple[str, Replies]] = field(
        factory=list
    )  # by worker; legs that had not ended when they were left
    _refusal: tuple[str, EngineRefused] | None = None  # by which worker
    _second_opinions: int = 0
    _losses: int = 0
    _preemptions: int = 0
    _drains: int = 0
    _crashes: int = 0
    _pause_s: float = 0.0  # before a worker that was lost may be asked again

    async def run(self, route: Route | None) -> Finished:
        """Return the result; raises the `RequestError` of the last attempt if no other worker can go on."""
        self.route = route or await self.routing.wait_for(self.remaining)
        try:
            while (finished := await self._attempt()) is None:
                self._asked_before = True
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
        """The names of the workers that it must not move to: those of its route, and those that crashed under it."""
        return {*self.route.names, *self._crashed_names}

    def move(self, route: Route) -> None:
        """Cancel the current attempt, which has not begun, and go on at `route`; replies from now on are dropped."""
        self.moves += 1
        self._moved_to = route
        self._asking.cancel(reason="it can begin at once elsewhere")

    async def _attempt(self) -> Finished | None:
        """Ask once; return the result, or None with another `route`. Raises an error that ends the request."""
        lost: RequestError | None = None
        try:
            with trio.CancelScope() as self._asking:
                finished = await self._ask(self.route)
                if self._moved_to is None:
                    return self._total(finished)
        except RequestError as error:
            lost = error
        finally:
            self.unstarted.discard(self)
        await trio.lowlevel.checkpoint()
        if self._moved_to is not None:
            self.route, self._moved_to = self._moved_to, None
            self.routing.observer.call_resumed(MOVED, len(self._sent))
            return None
        assert lost is not None  # else it was moved or answered
        if (other := self._second_opinion(self.route, lost)) is not None:
            self.route = other
            return None
        if not isinstance(lost, FAILOVER):
            raise lost
        if (ended := self._complete()) is not None:
            return ended
        self.route = await self._next_route(lost)
        self.routing.observer.call_resumed(lost.code, len(self._sent))
        return None

    # One worker, or two ------------------------------------------------------------------

    async def _ask(self, route: Route) -> Finished:
        """Ask the worker, or both legs at once: the failure of either ends the other in the same turn."""
        self._sent_before = len(self._sent)
        if self._first_route is None:
            self._cached, self._weights = None, self.routing.pool.weights()
        try:
            request = self._next_request() if self._asked_before else self.request
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
            # A cancellation or a bug is what ends the attempt, whatever has become of a leg meanwhile.
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
            if self._first_route is None:
                self._first_route = route
                self._acquit()
                self._cached = reply.cached_tokens if self._cached is None else self._cached
                self.answer.put(Started(self._cached), 0)

        async with self._leg(route, route.decode, request) as replies:
            finished = await replies.relay(pass_on)
        assert finished is not None  # a relay without a deadline has a result
        return finished

    async def _prefill(self, route: Route, prefill: Worker, request: Generate) -> None:
        def note(reply: Started | Tokens) -> None:
            if isinstance(reply, Started):
                route.begun()
                prefill.begun(request.id)
                if self._first_route is None or self._first_route is route:
                    self._cached = reply.cached_tokens

        async with self._leg(route, prefill, request) as replies:
            await replies.relay(note)

    @asynccontextmanager
    async def _leg(self, route: Route, worker: Worker, request: Generate) -> AsyncIterator[Replies]:
        name = worker.load.name
        with self._watched(route, worker):
            async with route.ask(worker, self._with_span(request)) as replies:
                try:
                    yield replies
                finally:
                    if not replies.over.is_set():
                        self._left_legs.append((name, replies))

    def _with_span(self, request: Generate) -> Generate:
        """Return the request of one leg; if its trace is sampled, with a span of its own."""
        if request.trace is None or not request.trace.followed:
            return request
        return evolve(request, trace=child_span(request.trace, self.routing.new_id()))

    def _rendezvous(self, prefill: Worker) -> Rendezvous:
        if prefill.bootstrap is None:  # it was there when the prefill was chosen
            self._lost_names.add(prefill.load.name)
            raise HandOffFailed(f"prefill {prefill.load.name} does not say any more where its rendezvous is")
        return Rendezvous(self.routing.new_room(), *prefill.bootstrap)

    @contextmanager
    def _watched(self, route: Route, worker: Worker) -> Iterator[None]:
        """Observe how the call in the body ends, and count a failure against the worker."""
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
            self.routing.observer.call_ended(name, outcome)

    def _handed_over(self, route: Route) -> None:
        """Note that the hand-off succeeded. Only the decode knows: a prefill knows no more than what it has sent."""
        if route.prefill is not None and self._handed_route is not route:
            self._handed_route = route
            self.routing.answered(route.prefill.load.name)
            self.routing.answered(route.name)

    def _blame(self, route: Route, worker: Worker, error: RequestError) -> None:
        # It is not known which leg has let the other wait until the deadline of either.
        late = isinstance(error, DeadlineExceeded) and not isinstance(error, Preempted)
        unmet = late and route.prefill is not None and self._handed_route is not route
        if isinstance(error, HandOffFailed) or unmet:
            self.routing.failed(route.name, error)
        elif late or isinstance(error, InternalError):
            self.routing.failed(worker.load.name, error)
        elif isinstance(error, EngineRefused) and self._refusal is None:
            self._refusal = worker.load.name, error
        if isinstance(error, EngineLost):
            self._crashed_names.add(worker.load.name)
        self._lost_names.add(worker.load.name)
        if isinstance(error, HandOffFailed):  # it is not known which of the two is at fault
            self._lost_names.update(route.names)

    def _second_opinion(self, route: Route, error: RequestError) -> Route | None:
        """Return another route to ask at once if the error may be the worker's fault; None if it is not, or none is.

        A refusal may be right, or the engine may be broken. The failure of a worker that is probed costs no request.
        """
        tried = bool(route.probed) and isinstance(error, DeadlineExceeded | InternalError)
        if self._sent or self._second_opinions or not (tried or isinstance(error, EngineRefused)):
            return None
        other = self.routing.choose(self.remaining, {*self._lost_names, *self._crashed_names, *route.names})
        if other is not None:
            self._second_opinions += 1
            self.routing.observer.call_resumed(error.code, 0)
        return other

    def _acquit(self) -> None:
        """Count its refusal against the engine that refused this request, since another has begun to answer it."""
        if self._refusal is not None:
            self.routing.failed(*self._refusal)
            self._refusal = None

    # The next attempt -------------------------------------------------------------------------

    def _next_request(self) -> Generate:
        """Return the request of the next attempt, with an id of its own: the last worker may still hold the other."""
        return evolve(self.remaining, id=self.routing.new_id())

    def _complete(self) -> Finished | None:
        """Return the result if every token was sent, and only the end of the answer was lost."""
        sampling, sent = self.request.sampling, self._sent
        if not sent:
            return None
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.routing.ends)
        if sent[-1] in stops and len(sent) > sampling.tokens_min:
            return self._finished(FinishReason.STOP, sent[-1], len(sent))
        return self._finished(FinishReason.LENGTH, None, len(sent)) if len(sent) >= sampling.tokens_max else None

    async def _next_route(self, lost: RequestError) -> Route:
        """Wait for the route of the next attempt; raises `lost` past a limit, or if the rest might not be exact."""
        limits, sent = self.routing.limits, len(self._sent)
        unready, planned = isinstance(lost, NotReady), is_planned(lost)
        self._preemptions += isinstance(lost, Preempted)
        self._drains += planned
        self._losses += not (unready or planned)  # an unready worker has begun nothing, and will be back
        self._pause_s = min(2 * self._pause_s, limits.pause_max_s) if unready and self._pause_s else limits.pause_s
        if self._losses > limits.resumes_max or self._drains > limits.drains_max or sent > limits.resume_tokens_max:
            raise lost
        if self._preemptions > limits.preemptions_max:
            raise lost
        if sent and not resumes_exactly(self.request.sampling):
            self.routing.observer.call_not_resumed(lost.code)
            raise lost
        self._crashes += isinstance(lost, EngineLost)
        if self._losses > 1 and self._crashes + len(self._left_legs) > limits.crashes_max:
            await self._count_stuck(limits.resume_s)
        dead = self._crashes > limits.crashes_max or not self.routing.has_others(self._crashed_names)
        if self._crashes and dead:
            raise lost
        with trio.move_on_after(limits.resume_s):
            route = await self.routing.wait_for_other(
                self.remaining, self._lost_names, self._crashed_names, self._pause_s
            )
            if not (sent and self._weights not in {None, self.routing.pool.weights()}):
                return route
            route.end()  # the rest would be by another model than what was sent
        raise lost

    async def _count_stuck(self, within_s: float) -> None:
        """Count engines that this request was taken from, and that do not release it, as crashed."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(within_s):
            async with trio.open_nursery() as waiting:
                for _, replies in self._left_legs:
                    waiting.start_soon(replies.over.wait)
        for name, replies in self._left_legs:
            if not replies.over.is_set() or isinstance(replies.failure, EngineLost):
                self._crashed_names.add(name)
                self._crashes += 1
        self._left_legs.clear()

    def _total(self, finished: Finished) -> Finished:
        """Return the result of the last attempt with the tokens of all of them."""
        return self._finished(finished.reason, finished.matched, self._sent_before + finished.usage.completion_tokens)

    def _finished(self, reason: FinishReason, matched: str | int | None, completion_tokens: int) -> Finished:
        return Finished(reason, Usage(len(self.request.tokens), completion_tokens, self._cached or 0), matched)


def is_planned(lost: RequestError) -> bool:
    """Whether a worker was lost without a failure: its node drains, or a newer link replaced the one to it."""
    return isinstance(lost, Draining) or (isinstance(lost, LinkLost) and type(lost) is not LinkLost)


def resumes_exactly(sampling: Sampling) -> bool:
    """Whether the next token depends on the prompt and the tokens that were sent alone.

    The state of a grammar is not known to another engine; what penalties count is, by `said`.
    """
    return sampling.grammar is None


def _gravest(group: BaseExceptionGroup[RequestError]) -> RequestError:
    """Return the most telling error of two legs: the cause rather than what the other leg made of it."""
    errors = [leaf for leaf in leaves(group) if isinstance(leaf, RequestError)]
    return min(errors, key=lambda each: (isinstance(each, FAILOVER), isinstance(each, HandOffFailed)))
