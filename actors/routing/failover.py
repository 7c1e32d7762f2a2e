"""The losses of one request, and the decision whether and where it goes on after one.

`FAILOVER` names the possible faults of a worker, its node or the link; any other error is the request's own. A request
goes on within limits, which are counted by cause: a drain is no fault and costs little, while a crash may be the
request's own doing, and a request that crashes engines must not be given to all of them. An engine that does not
release a moved request counts as crashed as well.

The successes and failures of a request count for its workers in the pool's outlier detection. After a failed hand-off
either leg may be at fault, so it counts for the pair. No error is hidden: a request that cannot go on ends with the
error of its last loss.
"""

from __future__ import annotations

import trio
from attrs import define, field

from actors.kit.groups import leaves
from actors.routing.ports import Replies, Worker
from actors.routing.route import Route
from actors.routing.routing import Routing
from protocol.errors import (
    ActorLost,
    AdapterNotLoaded,
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
from protocol.messages.cluster import engine_and_rank
from protocol.messages.generation import Generate

FAILOVER = (ActorLost, AdapterNotLoaded, Draining, EngineLost, HandOffFailed, LinkLost, NotReady, Overloaded, Preempted)
"""Errors after which a request goes on with another worker: that worker, its node or the link to it may be to blame."""


@define(eq=False)
class Failover:
    """The losses of one request, the workers at fault, and the choice of the next ones."""

    routing: Routing
    lost_names: set[str] = field(factory=set)  # the workers that lost it
    crashed_names: set[str] = field(factory=set)  # workers whose engine crashed under it: never asked again
    left_legs: list[tuple[str, Replies]] = field(factory=list)  # calls that it left before their end, by worker
    weights: str | None = None  # the weights of the first answering workers
    block: int = 0  # the tokens that their diffusion model computes together
    _handed_route: Route | None = None  # the last one with a successful hand-off
    _refusal: tuple[str, EngineRefused] | None = None  # the refusing worker, and its error
    _second_opinions: int = 0
    _losses: int = 0
    _preemptions: int = 0
    _drains: int = 0
    _crashes: int = 0
    _pause_s: float = 0.0  # the pause before a lost worker may be asked again

    # Observations of workers -----------------------------------------------------------------

    def handed_over(self, route: Route) -> None:
        """Count a successful hand-off, once the decode has begun: a prefill sees only its own sending."""
        if route.prefill is not None and self._handed_route is not route:
            self._handed_route = route
            self.routing.answered(route.prefill.full_name)
            self.routing.answered(route.name)

    def ended(self, route: Route, worker: Worker) -> None:
        """Count the success of a worker whose answer has ended; a prefill's success counts at the hand-off."""
        if worker is route.decode:
            self.handed_over(route)
            self.routing.answered(worker.full_name)

    def failed(self, route: Route, worker: Worker, error: RequestError) -> None:
        """Count an error against its worker, or against the pair."""
        # It is not known which leg has let the other wait until the deadline of either.
        late = isinstance(error, DeadlineExceeded) and not isinstance(error, Preempted)
        unmet = late and route.prefill is not None and self._handed_route is not route
        if isinstance(error, HandOffFailed) or unmet:
            self.routing.failed(route.name, error)
        elif late or isinstance(error, InternalError):
            self.routing.failed(worker.full_name, error)
        elif isinstance(error, EngineRefused) and self._refusal is None:
            self._refusal = worker.full_name, error
        if isinstance(error, EngineLost):
            self.crashed_names.update(self._ranks_of(worker.full_name))
        self.lost_names.add(worker.full_name)
        if isinstance(error, HandOffFailed):  # it is not known which of the two is at fault
            self.lost_names.update(route.names)

    def _ranks_of(self, name: str) -> set[str]:
        """Return the names of all ranks of a worker's engine, which are lost together."""
        engine, _ = engine_and_rank(name)
        if engine == name:
            return {name}
        return {name, *(other for other in self.routing.pool.expected() if engine_and_rank(other)[0] == engine)}

    def blame_refusing(self) -> None:
        """Count a refusal against the refusing engine, since another one has begun to answer the request."""
        if self._refusal is not None:
            self.routing.failed(*self._refusal)
            self._refusal = None

    # The next workers --------------------------------------------------------------------------

    def second_opinion(self, route: Route, error: RequestError, remaining: Generate) -> Route | None:
        """Return another route to ask at once if the error may be the worker's fault and a route is free, else None.

        A refusal may be right, or the engine may be broken. A probe of an ejected worker must not fail its request. The
        caller has sent nothing yet.
        """
        probed = bool(route.probed) and isinstance(error, DeadlineExceeded | InternalError)
        if self._second_opinions or not (probed or isinstance(error, EngineRefused)):
            return None
        other = self.routing.choose(remaining, {*self.lost_names, *self.crashed_names, *route.names})
        if other is not None:
            self._second_opinions += 1
            self.routing.observer.call_resumed(error.code, 0)
        return other

    def _is_elsewhere(self, request: Generate) -> bool:
        """Whether another worker has the adapter of a request."""
        return request.adapter is not None and self.routing.has_adapter(request.adapter, self.lost_names)

    async def next_route(self, lost: RequestError, remaining: Generate, sent: int) -> Route:
        """Wait for the route of the next attempt; raises `lost` beyond a limit, or if the rest might not be exact.

        `sent` is the number of sent tokens, at the end of the remaining request's prompt.
        """
        limits = self.routing.limits
        # A worker without the adapter has begun nothing, either.
        unready, planned = isinstance(lost, AdapterNotLoaded | NotReady), is_planned(lost)
        if isinstance(lost, AdapterNotLoaded) and not self._is_elsewhere(remaining):
            raise lost
        self._preemptions += isinstance(lost, Preempted)
        self._drains += planned
        self._losses += not (unready or planned)  # an unready worker has begun nothing, and will be back
        self._pause_s = min(2 * self._pause_s, limits.pause_max_s) if unready and self._pause_s else limits.pause_s
        if self._losses > limits.resumes_max or self._drains > limits.drains_max or sent > limits.resume_tokens_max:
            raise lost
        if self._preemptions > limits.preemptions_max:
            raise lost
        if sent and not resumes_exactly(remaining, self.block):
            self.routing.observer.call_not_resumed(lost.code)
            raise lost
        self._crashes += isinstance(lost, EngineLost)
        if self._losses > 1 and self._crashes + len(self.left_legs) > limits.crashes_max:
            await self._count_stuck(limits.resume_s)
        dead = self._crashes > limits.crashes_max or not self.routing.has_others(self.crashed_names)
        if self._crashes and dead:
            raise lost
        with trio.move_on_after(limits.resume_s):
            route = await self.routing.wait_for_other(remaining, self.lost_names, self.crashed_names, self._pause_s)
            if not (sent and self.weights not in {None, self.routing.pool.weights()}):
                return route
            route.end()  # the rest would be another model's
        raise lost

    async def _count_stuck(self, within_s: float) -> None:
        """Count engines that do not release this request after it left them as crashed."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(within_s):
            async with trio.open_nursery() as waiting:
                for _, replies in self.left_legs:
                    waiting.start_soon(replies.over.wait)
        for name, replies in self.left_legs:
            if not replies.over.is_set() or isinstance(replies.failure, EngineLost):
                self.crashed_names.update(self._ranks_of(name))
                self._crashes += 1
        self.left_legs.clear()


def is_planned(lost: RequestError) -> bool:
    """Whether a worker was lost without a failure: its node drains, or a newer link replaced the one to it."""
    return isinstance(lost, Draining) or (isinstance(lost, LinkLost) and type(lost) is not LinkLost)


def resumes_exactly(remaining: Generate, block: int = 0) -> bool:
    """Whether the next token depends on the prompt and the sent tokens alone.

    Another engine lacks the state of a grammar; penalties are counted by `Generate.resumed_tokens`. A diffusion model
    computes the tokens of a block together: in the middle of one another engine would take the sent ones for given.
    """
    return remaining.sampling.grammar is None and not (block and len(remaining.tokens) % block)


def cause(group: BaseExceptionGroup[RequestError]) -> RequestError:
    """Return the likely cause of two legs' errors: rather one of the request itself, and last a failed hand-off."""
    errors = [leaf for leaf in leaves(group) if isinstance(leaf, RequestError)]
    return min(errors, key=lambda error: (isinstance(error, FAILOVER), isinstance(error, HandOffFailed)))
