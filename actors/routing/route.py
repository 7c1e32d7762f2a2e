"""Which worker, or which pair, computes a request: those with room, and a place kept until they are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager

import trio
from attrs import define, evolve, field, frozen

from actors.routing.load import Policy
from actors.routing.ports import Pool, Replies, Watch, Worker
from protocol.cluster import Leg
from protocol.messages import Generate


@frozen
class Limits:
    """How far a request goes on after the loss of a worker: how often, with how many tokens sent, for how long."""

    resumes_max: int = 3
    drains_max: int = 64  # losses that were planned, or that another link has mended: nobody is at fault
    crashes_max: int = 1  # of engines under one request, after which it may be what kills them
    resume_tokens_max: int = 65_536
    resume_s: float = 10.0  # to find another worker
    pause_s: float = 0.1  # before one that was lost is asked again, where there is no other
    pause_max_s: float = 2.0  # the same, of one that is never ready: each time twice as long, up to this


@frozen
class Need:
    """What a request takes, in tokens: the prompt that it has now, and all that it may come to."""

    prompt: int = 0
    total: int = 0

    @classmethod
    def of(cls, request: Generate) -> Need:
        """Return what a request takes of a worker."""
        prompt = len(request.tokens)
        return cls(prompt, prompt + request.sampling.tokens_max)


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

    def choose(self, need: Need, but: Collection[str] = ()) -> Route | None:
        """Return a route with room for one more request that avoids some names; None if there is none now.

        Whether there is one does not depend on what the request needs.
        """
        workers = [worker for worker in self.pool.workers() if worker.load.name not in but]
        whole = self._free(workers, Leg.BOTH, need)
        prefill, decode = (self._free(workers, leg, need) for leg in (Leg.PREFILL, Leg.DECODE))
        if prefill is None or decode is None or (whole is not None and need.prompt < self.prefill_tokens_min):
            return None if whole is None else Route(whole, None, self._places)
        return Route(decode, prefill, self._places)

    def choose_next(self, need: Need) -> Route | None:
        """Return a route if there is one and nobody has waited for it already."""
        return None if self._order.locked() else self.choose(need)

    async def wait_for(self, need: Need) -> Route:
        """Wait for a route, behind those who wait already."""
        async with self._order:
            while (route := self.choose(need)) is None:
                await self.pool.wait_changed()
                await trio.lowlevel.checkpoint()  # a turn later than those whose answer has begun
            return route

    async def wait_for_other(self, need: Need, lost: Collection[str], dead: Collection[str], pause_s: float) -> Route:
        """Wait for a route, ahead of those who wait for a first; `lost` may be asked after a pause, `dead` not."""
        with trio.move_on_after(pause_s):
            await trio.lowlevel.checkpoint()
            while (route := self.choose(need, {*lost, *dead})) is None:
                await self.pool.wait_changed()
            return route
        while (route := self.choose(need, {*lost, *dead}) or self.choose(need, dead)) is None:
            await self.pool.wait_changed()
        return route

    def others(self, dead: Collection[str]) -> bool:
        """Whether for each leg there is a worker, or one to come, that is none of the `dead`, however busy."""
        legs = {leg for name, leg in self.pool.expected().items() if name not in dead}
        return Leg.BOTH in legs or {Leg.PREFILL, Leg.DECODE} <= legs

    def _free(self, workers: Sequence[Worker], leg: Leg, need: Need) -> Worker | None:
        of_leg = [worker for worker in workers if worker.leg is leg]
        if leg is Leg.PREFILL:  # until it has said where its rendezvous is, nobody can meet it there
            of_leg = [worker for worker in of_leg if worker.bootstrap is not None]
        loads = [worker.load for worker in of_leg]
        tokens = need.prompt if leg is Leg.PREFILL else need.total
        at = self.policy([evolve(load, busy=load.busy + self._places[load.name]) for load in loads], tokens)
        return None if at is None else of_leg[at]
