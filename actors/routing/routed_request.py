"""One request on its way through its workers: both legs asked at once, and other workers when one is lost.

A request is one *attempt* after the other, each on a `Route`: one worker, or a prefill and a decode in one nursery, in
which the failure of either leg ends the other. The asker sees one unbroken answer, since the sent tokens are kept: the
next attempt has them at the end of its prompt, under another id, and computes only the rest. The answer is exact where
each token depends on the tokens before it alone.

`Failover` decides whether a request goes on, and where; `Routing` chooses the workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, evolve, field

from actors.kit.groups import raise_part
from actors.routing.encoding import placed
from actors.routing.failover import FAILOVER, Failover, cause
from actors.routing.hand_off import PairHandOff
from actors.routing.ports import Replies, Worker
from actors.routing.rebalancing import UnstartedRequests
from actors.routing.route import Route
from actors.routing.route_spans import RouteSpans
from actors.routing.routing import Routing
from protocol.errors import AskerLeft, HandOffFailed, RequestError
from protocol.messages.generation import Finished, FinishReason, Generate, Started, Tokens, Usage
from protocol.token_ids import TokenIds

MOVED = "moved"
"""The outcome reported for a request moved before it had begun."""


@define(eq=False)
class RoutedRequest:
    """One request: its attempts with one worker after the other, and its one unbroken answer."""

    request: Generate
    answer: Replies
    routing: Routing
    unstarted: UnstartedRequests
    route: Route = field(init=False)  # the current attempt's
    moves: int = 0  # the number of its moves
    _moving: bool = False
    _moved_to: Route | None = None
    _asking: trio.CancelScope = field(factory=trio.CancelScope)
    _asked_before: bool = False  # an earlier worker may still hold something under its id
    _sent: list[int] = field(factory=list)
    _version: str = ""  # of the weights that compute the answer, as passed on
    _first_route: Route | None = None  # the route of the first attempt that began to answer
    _cached: int | None = None  # prompt tokens found in the cache; a pair's, by its prefill
    _failover: Failover = field(init=False)
    _spans: RouteSpans = field(init=False)
    _remaining: Generate = field(init=False)  # kept: it may be a copy of a long prompt, and is looked at often

    def __attrs_post_init__(self) -> None:
        self._failover, self._remaining = Failover(self.routing), self.request
        self._spans = RouteSpans(self.routing.spans, self.request.trace, self.routing.new_id)

    async def run(self, route: Route | None) -> Finished:
        """Return the result; raises the `RequestError` of the last attempt if no other worker can go on."""
        self._spans.choosing()
        self.route = route or await self.routing.wait_for(self.remaining)
        self._spans.chosen(self.route)
        try:
            while (finished := await self._attempt()) is None:
                self._asked_before = True
            return finished
        finally:
            if self._moved_to is not None:
                self._moved_to.end()

    @property
    def remaining(self) -> Generate:
        """The rest of the request: the sent tokens are part of its prompt."""
        sampling, sent = self.request.sampling, self._sent
        if len(sent) != self._remaining.resumed_tokens - self.request.resumed_tokens:
            self._remaining = evolve(
                self.request,
                tokens=self.request.tokens + TokenIds.of(sent),
                resumed_tokens=self.request.resumed_tokens + len(sent),
                sampling=evolve(
                    sampling,
                    tokens_max=sampling.tokens_max - len(sent),
                    tokens_min=max(0, sampling.tokens_min - len(sent)),
                ),
            )
        return self._remaining

    @property
    def avoided(self) -> set[str]:
        """The names of workers that crashed under it, forbidden for a move.

        Nor does it move to an overcommitted one of its route, where nothing can begin; the other leg may stay.
        """
        return self._failover.crashed_names

    def move(self, route: Route | None) -> None:
        """Cancel the current attempt, which has not begun, and go on at `route`; replies from now on are dropped.

        None: at the next route that there is, be it the same.
        """
        self.moves += 1
        self._moving, self._moved_to = True, route
        self._asking.cancel(reason="it can begin at once elsewhere")

    async def _attempt(self) -> Finished | None:
        """Ask once; return the result, or None with another `route`. Raises an error that ends the request."""
        route = self.route
        try:
            return await self._attempt_at(route)
        finally:
            route.give_slot_back()

    async def _attempt_at(self, route: Route) -> Finished | None:
        lost: RequestError | None = None
        try:
            with trio.CancelScope() as self._asking:
                finished = await self._ask(route)
                if not self._moving:
                    return self._finished(finished.reason, finished.matched)
        except RequestError as error:
            lost = error
        finally:
            self.unstarted.discard(self)
        await trio.lowlevel.checkpoint()
        self._spans.choosing()
        if self._moving:
            self._moving = False
            self.route = self._moved_to or await self.routing.wait_for_other(
                self.remaining, (), self._failover.crashed_names, 0.0
            )
            self._moved_to = None
            self._went_on(MOVED)
            return None
        assert lost is not None  # else it was moved or answered
        if not self._sent and (other := self._failover.second_opinion(route, lost, self.request)) is not None:
            self.route = other
            self._spans.chosen(other, lost=lost.code)
            return None
        if not isinstance(lost, FAILOVER):
            raise lost
        if (ended := self._complete()) is not None:
            return ended
        self.route = await self._failover.next_route(lost, self.remaining, len(self._sent))
        self._went_on(lost.code)
        return None

    def _went_on(self, code: str) -> None:
        self.routing.observer.call_resumed(code, len(self._sent))
        self._spans.chosen(self.route, lost=code, sent=len(self._sent))

    # One worker, or two ------------------------------------------------------------------

    async def _ask(self, route: Route) -> Finished:
        """Ask the worker, or both legs at once: the failure of either ends the other in the same turn."""
        if self._first_route is None:
            self._cached, self._failover.weights = None, self.routing.pool.weights()
            self._failover.block = 0 if (info := route.decode.info) is None else info.diffusion_block
        try:
            request = self._next_request() if self._asked_before else self.request
            self.unstarted.add(self)
            for pool, actual in self.routing.diversions(route, request):
                self.routing.observer.diverted(pool, actual)
            if route.prefill is None:
                return await self._decode(route, request)
            async with trio.open_nursery() as legs:
                hand_off = self._hand_off(route.prefill)
                legs.start_soon(self._prefill, route, evolve(request, hand_off=hand_off.for_prefill), hand_off)
                # Where both meet, the decode is asked in this turn, so that neither waits for the other.
                handed = await hand_off.state() if hand_off.is_sequential else hand_off.for_prefill
                of_decode = evolve(request, media=placed(request.media), hand_off=handed, prompt_logprobs=False)
                finished = await self._decode(route, of_decode, hand_off)
                legs.cancel_scope.cancel(reason="the decode has ended")
        except BaseExceptionGroup as group:
            failed, rest = group.split(RequestError)
            try:
                if failed is None:
                    raise
                # A cancellation or a bug ends the attempt, even if a leg has failed as well.
                raise_part(rest or cause(failed))
            finally:
                del failed, rest  # their tracebacks refer to this frame, and so to the request
        finally:
            route.end_attempt()
        return finished  # noqa: ASYNC910  # the decode has checkpoints

    async def _decode(self, route: Route, request: Generate, hand_off: PairHandOff | None = None) -> Finished:
        is_whole = not self._sent  # else another worker has computed the beginning of the answer

        def pass_on(reply: Started | Tokens) -> None:
            if self._moving:
                return
            if isinstance(reply, Tokens):
                if not reply.ids:
                    if reply.version:
                        self._announce(reply.version)
                    return
                self._sent += reply.ids
                self.answer.put(reply, len(reply.ids))
                self.answer.extend_fast_path(replies, record)
                return
            route.decode.begun(request.id)
            self._begun(reply, route, hand_off)

        def record(ids: Sequence[int], _: float) -> None:
            self._sent += ids

        async with self._leg(route, route.decode, request) as replies:
            if hand_off is not None and self._wants_scores:
                finished = await replies.relay(hand_off.behind_scores(pass_on))
                await hand_off.wait_begun()
            else:
                finished = await replies.relay(pass_on)
        assert finished is not None  # a relay without a deadline has a result
        if is_whole and not self._moving:
            route.answered(self._sent, finished.reason)
        return finished

    def _begun(self, started: Started, route: Route, hand_off: PairHandOff | None) -> None:
        """Note the beginning of an attempt, and pass on the first one."""
        self.unstarted.discard(self)
        self._failover.handed_over(route)
        if hand_off is not None:
            hand_off.taken()
            self._spans.handed_over(route)
        route.begun()
        if self._first_route is not None:
            self._announce(started.version)
            return
        self._first_route = route
        self._failover.blame_refusing()
        if self._cached is None:
            self._cached = self._cached_tokens(started)
        self.routing.observer.answer_begun(route.predicted, self._cached, route.blind)
        self._version = started.version
        scores = started.scores if hand_off is None else hand_off.scores
        self.answer.put(Started(self._cached, route.taken, scores=scores, version=started.version), 0)

    async def _prefill(self, route: Route, request: Generate, hand_off: PairHandOff) -> None:
        prefill = hand_off.prefill

        def note(reply: Started | Tokens) -> None:
            if isinstance(reply, Started):
                # A state takes its share of the prefill until its decode has the KV cache, as at a rendezvous.
                if not hand_off.is_sequential:
                    route.begun()
                prefill.begun(request.id)
                self._spans.handed_over(route)
                if self._first_route is None or self._first_route is route:
                    self._cached = self._cached_tokens(reply)
                hand_off.begun(reply)

        async with self._leg(route, prefill, request) as replies:
            with hand_off.lease:
                await replies.relay(note)
            hand_off.ended()

    @asynccontextmanager
    async def _leg(self, route: Route, worker: Worker, request: Generate) -> AsyncIterator[Replies]:
        name = worker.full_name
        with self._watched(route, worker), self._spans.leg(worker, request) as traced:
            async with route.ask(worker, traced) as replies:
                try:
                    yield replies
                finally:
                    if not replies.over.is_set():
                        self._failover.left_legs.append((name, replies))

    def _hand_off(self, prefill: Worker) -> PairHandOff:
        try:
            return PairHandOff.of(prefill, self.routing.hand_offs, self.routing.new_number())
        except HandOffFailed:
            self._failover.lost_names.add(prefill.full_name)
            raise

    @contextmanager
    def _watched(self, route: Route, worker: Worker) -> Iterator[None]:
        """Observe how the call in the body ends, and count a failure against the worker."""
        name, outcome = worker.full_name, AskerLeft.code
        try:
            yield
            outcome = "ended"
            self._failover.ended(route, worker)
        except RequestError as error:
            outcome = error.code
            self._failover.failed(route, worker, error)
            raise
        finally:
            self.routing.observer.call_ended(name, outcome)

    def _announce(self, version: str) -> None:
        """Pass on the version of the weights that compute the next tokens, if it is another; empty: it is not known."""
        if version != self._version:
            self._version = version
            self.answer.put(Tokens((), version=version), 0)

    # The next attempt -------------------------------------------------------------------------

    def _next_request(self) -> Generate:
        """Return the request of the next attempt, with an id of its own: the last worker may still hold the other."""
        return evolve(self.remaining, id=self.routing.new_id(), prompt_logprobs=self._wants_scores)

    @property
    def _wants_scores(self) -> bool:
        """Whether the asker waits for the log probabilities of the prompt, which come as the answer begins."""
        return self.request.prompt_logprobs and self._first_route is None

    def _complete(self) -> Finished | None:
        """Return the result if every token was sent, and only the end of the answer was lost."""
        sampling, sent = self.request.sampling, self._sent
        if not sent:
            return None
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.routing.ends)
        if sent[-1] in stops and len(sent) > sampling.tokens_min:
            return self._finished(FinishReason.STOP, sent[-1])
        return self._finished(FinishReason.LENGTH, None) if len(sent) >= sampling.tokens_max else None

    def _cached_tokens(self, started: Started) -> int:
        """Return the cached tokens that a worker counts, at most as many as the prompt has."""
        return min(started.cached_tokens, len(self.request.tokens))

    def _finished(self, reason: FinishReason, matched: str | int | None) -> Finished:
        """Return the result, with the tokens of all attempts as they came through here: no worker's count is used."""
        usage = Usage(len(self.request.tokens), len(self._sent), self._cached or 0)
        return Finished(reason, usage, matched)
