"""Router: choose who computes, ask both legs at once, and carry on with somebody else when a worker is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol, TypeAlias

import trio
from attrs import define, evolve, field, frozen

from actors._kit import Answer, Asks, Bugs, Call, Inbox
from actors.routing.least_loaded import Load
from protocol.cluster import Leg
from protocol.errors import (
    ActorLost,
    Draining,
    EngineLost,
    HandOffFailed,
    Left,
    LinkLost,
    NotReady,
    Overloaded,
    RequestError,
)
from protocol.messages import Finished, FinishReason, Generate, Rendezvous, Sampling, Started, Tokens, Usage
from protocol.trace import span_after

Replies: TypeAlias = Answer[Started | Tokens, Finished]
Policy: TypeAlias = Callable[[Sequence[Load]], int | None]

ELSEWHERE = (ActorLost, Draining, EngineLost, HandOffFailed, LinkLost, NotReady, Overloaded)
"""What ends a request here and need not end it elsewhere: the worker is to blame, or its host, or the way to it."""


class Worker(Asks[Generate, Started | Tokens, Finished], Protocol):
    """One worker of a model, wherever it is; from the turn in which it is asked, the request counts in its load."""

    @property
    def load(self) -> Load:
        """How busy it is; no other worker of its pool has its name."""

    @property
    def leg(self) -> Leg:
        """Which part of a request it computes."""

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its rendezvous, if it is a prefill."""


class Pool(Protocol):
    """The workers of one model."""

    def workers(self) -> Sequence[Worker]:
        """Return those that can be asked now."""

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs of these and of those that should soon be among them, by the names of their loads."""

    async def wait_changed(self) -> None:
        """Wait until a worker has come, gone, or become less busy."""


class Watch:
    """Who hears, once a call and never once a token, what becomes of requests; this one forgets it."""

    def called(self, worker: str, outcome: str) -> None:
        """Hear that a worker's answer is over: `ended`, `left`, or an error's code."""

    def went_on(self, code: str, sent: int) -> None:
        """Hear that a request goes on elsewhere: what its worker was lost with, after how many tokens."""


@frozen
class Limits:
    """How far a request goes on after the loss of a worker: how often, with how many tokens sent, for how long."""

    resumes_max: int = 3
    crashes_max: int = 1  # of engines under one request, after which it may be what kills them
    resume_tokens_max: int = 65_536
    resume_s: float = 10.0  # to find another worker
    pause_s: float = 0.1  # before one that was lost is asked again, where there is no other
    pause_max_s: float = 2.0  # the same, of one that is never ready: each time twice as long, up to this


@define(eq=False)
class Route:
    """Who computes a request: one worker, or a decode with a prefill before it; each keeps a place until it is asked.

    Other requests are routed in the turns between the choice and the asking: without the places that are kept, all
    that come at once would go to the same worker.
    """

    decode: Worker
    prefill: Worker | None
    _places: Counter[str]
    _kept: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._kept = [worker.load.name for worker in (self.decode, self.prefill) if worker is not None]
        self._places.update(self._kept)

    def ask(self, worker: Worker, request: Generate) -> AbstractAsyncContextManager[Replies]:
        """Ask one of them, to be entered in the same turn: from then on the worker counts the request itself."""
        self._let_go(worker.load.name)
        return worker.ask(request, request.sampling.tokens_max)

    def end(self) -> None:
        """Let go of the places of those that were not asked."""
        for name in tuple(self._kept):
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        self._kept.remove(name)
        self._places[name] -= 1
        if not self._places[name]:
            del self._places[name]


@define(eq=False)
class Routing:
    """What every request of a model is routed by."""

    pool: Pool
    policy: Policy
    limits: Limits
    new_room: Callable[[], int]
    new_id: Callable[[], str]
    prefill_tokens_min: int  # a shorter prompt goes to a worker that computes both, where there is one
    ends: frozenset[int]  # the tokens by which the model ends an answer
    watch: Watch = Watch()
    _places: Counter[str] = field(init=False, factory=Counter)  # kept for those that are about to ask
    _order: trio.StrictFIFOLock = field(init=False, factory=trio.StrictFIFOLock)

    def choose(self, prompt_tokens: int, but: Collection[str] = ()) -> Route | None:
        """Return a route with room for one more request that avoids some names; None if there is none now.

        Whether there is one does not depend on the prompt's length.
        """
        workers = [worker for worker in self.pool.workers() if worker.load.name not in but]
        whole = self._free(workers, Leg.BOTH)
        prefill, decode = self._free(workers, Leg.PREFILL), self._free(workers, Leg.DECODE)
        if prefill is None or decode is None or (whole is not None and prompt_tokens < self.prefill_tokens_min):
            return None if whole is None else Route(whole, None, self._places)
        return Route(decode, prefill, self._places)

    def choose_next(self, prompt_tokens: int) -> Route | None:
        """Return a route if there is one and nobody has waited for it already."""
        return None if self._order.locked() else self.choose(prompt_tokens)

    async def wait_for(self, prompt_tokens: int) -> Route:
        """Wait for a route, behind those who wait already."""
        async with self._order:
            while (route := self.choose(prompt_tokens)) is None:
                await self.pool.wait_changed()
                await trio.lowlevel.checkpoint()  # a turn later than those whose answer has begun
            return route

    async def wait_for_other(
        self, prompt_tokens: int, lost: Collection[str], dead: Collection[str], pause_s: float
    ) -> Route:
        """Wait for a route, ahead of those who wait for a first; `lost` may be asked after a pause, `dead` not."""
        with trio.move_on_after(pause_s):
            await trio.lowlevel.checkpoint()
            while (route := self.choose(prompt_tokens, {*lost, *dead})) is None:
                await self.pool.wait_changed()
            return route
        while (route := self.choose(prompt_tokens, {*lost, *dead}) or self.choose(prompt_tokens, dead)) is None:
            await self.pool.wait_changed()
        return route

    def others(self, dead: Collection[str]) -> bool:
        """Whether for each leg there is a worker, or one to come, that is none of the `dead`, however busy."""
        legs = {leg for name, leg in self.pool.expected().items() if name not in dead}
        return Leg.BOTH in legs or {Leg.PREFILL, Leg.DECODE} <= legs

    def _free(self, workers: Sequence[Worker], leg: Leg) -> Worker | None:
        of_leg = [worker for worker in workers if worker.leg is leg]
        if leg is Leg.PREFILL:  # until it has said where its rendezvous is, nobody can meet it there
            of_leg = [worker for worker in of_leg if worker.bootstrap is not None]
        loads = [worker.load for worker in of_leg]
        at = self.policy([evolve(load, busy=load.busy + self._places[load.name]) for load in loads])
        return None if at is None else of_leg[at]


async def router(
    inbox: Inbox[Call[Generate, Started | Tokens, Finished]],
    routing: Routing,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Give each request to the worker that the policy names; while all are full, requests wait in the inbox."""
    bugs = Bugs()

    async def route_one(call: Call[Generate, Started | Tokens, Finished], route: Route | None) -> None:
        with call.answering(bugs) as answer:
            answer.end(await _Journey(call.request, answer, routing).run(route))

    async with trio.open_nursery() as requests:
        task_status.started()
        while True:
            (await routing.wait_for(0)).end()  # only that there is one: a call that must wait does so in the inbox
            call = await inbox.receive()
            requests.start_soon(route_one, call, routing.choose_next(len(call.request.tokens)))


@define(eq=False)
class _Journey:
    """One request on its way, with one worker after the other if need be; whoever asked sees one unbroken answer."""

    request: Generate
    answer: Replies
    routing: Routing
    _sent: list[int] = field(factory=list)
    _before: int = 0  # tokens that were sent before the worker that is being asked
    _first: Route | None = None  # the one that began the answer
    _cached: int | None = None  # tokens of the prompt, as that one said; where there are two, the prefill knows
    _lost: set[str] = field(factory=set)
    _dead: set[str] = field(factory=set)  # whose engine died under this request: it is not given to them again
    _losses: int = 0
    _crashes: int = 0
    _pause_s: float = 0.0  # before one that was lost is asked again

    async def run(self, route: Route | None) -> Finished:
        """Return the result; raises the `RequestError` of the last worker if nobody can go on."""
        if route is None:
            route = await self.routing.wait_for(len(self.request.tokens))
        while True:
            try:
                return self._whole(await self._ask(route))
            except RequestError as error:
                if not isinstance(error, ELSEWHERE):
                    raise
                lost = error
            await trio.lowlevel.checkpoint()
            if (ended := self._ended()) is not None:
                return ended
            route = await self._elsewhere(lost)
            self.routing.watch.went_on(lost.code, len(self._sent))

    # One worker, or two ------------------------------------------------------------------

    async def _ask(self, route: Route) -> Finished:
        """Ask both legs at once: the failure of either ends the other in the same turn."""
        self._before = len(self._sent)
        if self._first is None:
            self._cached = None
        try:
            request = self._continued() if self._lost else self.request
            if route.prefill is None:
                return await self._decode(route, request)
            async with trio.open_nursery() as legs:
                request = evolve(request, rendezvous=self._rendezvous(route.prefill))
                legs.start_soon(self._prefill, route, route.prefill, request)
                finished = await self._decode(route, request)
                legs.cancel_scope.cancel(reason="the decode has ended")
        except BaseExceptionGroup as group:
            failed, rest = group.split(RequestError)
            if failed is None or rest is not None:
                raise
            raise _gravest(failed) from None
        finally:
            route.end()
        return finished

    async def _decode(self, route: Route, request: Generate) -> Finished:
        def pass_on(reply: Started | Tokens) -> None:
            if isinstance(reply, Tokens):
                self._sent += reply.ids
                self.answer.put(reply, len(reply.ids))
            elif self._first is None:
                self._first = route
                self._cached = reply.cached_tokens if self._cached is None else self._cached
                self.answer.put(Started(self._cached), 0)

        with self._watched(route, route.decode):
            async with route.ask(route.decode, self._of_leg(request)) as replies:
                finished = await replies.relay(pass_on)
        assert finished is not None  # nobody here has had enough
        return finished

    async def _prefill(self, route: Route, prefill: Worker, request: Generate) -> None:
        def note(reply: Started | Tokens) -> None:
            if isinstance(reply, Started) and (self._first is None or self._first is route):
                self._cached = reply.cached_tokens

        with self._watched(route, prefill):
            async with route.ask(prefill, self._of_leg(request)) as replies:
                await replies.relay(note)

    def _of_leg(self, request: Generate) -> Generate:
        """Return what one leg is asked; where the trace is followed, it has a span of its own."""
        if request.trace is None or not request.trace.followed:
            return request
        return evolve(request, trace=span_after(request.trace, self.routing.new_id()))

    def _rendezvous(self, prefill: Worker) -> Rendezvous:
        if prefill.bootstrap is None:  # it was there when the prefill was chosen
            self._lost.add(prefill.load.name)
            raise HandOffFailed(f"prefill {prefill.load.name} does not say any more where its rendezvous is")
        return Rendezvous(self.routing.new_room(), *prefill.bootstrap)

    @contextmanager
    def _watched(self, route: Route, worker: Worker) -> Iterator[None]:
        """Say how the call in the body ends, and blame the worker if it fails."""
        name, outcome = worker.load.name, Left.code
        try:
            yield
            outcome = "ended"
        except RequestError as error:
            outcome = error.code
            self._blame(route, worker, error)
            raise
        finally:
            self.routing.watch.called(name, outcome)

    def _blame(self, route: Route, worker: Worker, error: RequestError) -> None:
        if isinstance(error, EngineLost):
            self._dead.add(worker.load.name)
        self._lost.add(worker.load.name)
        if isinstance(error, HandOffFailed) and route.prefill is not None:  # which of the two is at fault, nobody knows
            self._lost |= {route.decode.load.name, route.prefill.load.name}

    # Another one -------------------------------------------------------------------------

    def _continued(self) -> Generate:
        """Return what is left to do, under another id: the worker that was lost may not have let go of the first."""
        sampling = self.request.sampling
        return evolve(
            self.request,
            id=self.routing.new_id(),
            tokens=[*self.request.tokens, *self._sent],
            said=self.request.said + len(self._sent),
            sampling=evolve(
                sampling,
                tokens_max=sampling.tokens_max - len(self._sent),
                tokens_min=max(0, sampling.tokens_min - len(self._sent)),
            ),
        )

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
        unready = isinstance(lost, NotReady)
        self._losses += not unready  # nothing was begun there, and it will be back
        self._pause_s = min(2 * self._pause_s, limits.pause_max_s) if unready and self._pause_s else limits.pause_s
        if self._losses > limits.resumes_max or sent > limits.resume_tokens_max:
            raise lost
        if sent and not resumes_exactly(self.request.sampling):
            raise lost
        if isinstance(lost, EngineLost):
            self._crashes += 1
            if self._crashes > limits.crashes_max or not self.routing.others(self._dead):
                raise lost
        tokens = len(self.request.tokens) + sent
        with trio.move_on_after(limits.resume_s):
            return await self.routing.wait_for_other(tokens, self._lost, self._dead, self._pause_s)
        raise lost

    def _whole(self, finished: Finished) -> Finished:
        """Return the result as if one worker had computed all of it."""
        return self._finished(finished.reason, finished.matched, self._before + finished.usage.completion_tokens)

    def _finished(self, reason: FinishReason, matched: str | int | None, completion_tokens: int) -> Finished:
        return Finished(reason, Usage(len(self.request.tokens), completion_tokens, self._cached or 0), matched)


def resumes_exactly(sampling: Sampling) -> bool:
    """Whether prompt and sent tokens are all that the next token depends on.

    A grammar is at a place that another engine does not know, and a penalty counts the tokens of the answer alone.
    """
    unpenalised = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0, 0, 1)
    return sampling.grammar is None and unpenalised


def _gravest(group: BaseExceptionGroup[RequestError]) -> RequestError:
    """Return the error that says most: a worker's own rather than what the other leg makes of it."""
    leaves: list[RequestError] = []
    left: list[BaseException] = [group]
    while left:
        error = left.pop(0)
        if isinstance(error, BaseExceptionGroup):
            left += error.exceptions
        elif isinstance(error, RequestError):
            leaves.append(error)
    return min(leaves, key=lambda each: (isinstance(each, ELSEWHERE), isinstance(each, HandOffFailed)))
