"""Which worker, or which pair, computes a request: those with room, and a place kept until they are asked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import trio
from attrs import define, field, frozen

from actors.routing.least_loaded import least_loaded
from actors.routing.load import Load, Policy
from actors.routing.outliers import Ejection, OutlierDetector, Suspect
from actors.routing.ports import Pool, Ranking, Replies, RoutingObserver, Worker
from actors.routing.reservations import Reservations
from protocol.cluster import Leg
from protocol.errors import RequestError
from protocol.messages import Generate

log = logging.getLogger(__name__)


@frozen
class FailoverLimits:
    """How far a request goes on after the loss of a worker: how often, with how many tokens sent, for how long."""

    resumes_max: int = 3
    drains_max: int = 64  # losses that were planned, or that another link has mended: nobody is at fault
    crashes_max: int = 1  # of engines under one request, after which it may be what kills them
    resume_tokens_max: int = 65_536
    resume_s: float = 10.0  # to find another worker
    move_after_s: float = 2.0  # that a worker with too much may let a request wait while another could begin at once
    moves_max: int = 2
    preemptions_max: int = 1  # of one request, by engines that go on with others
    ejection: Ejection = Ejection()  # of workers that keep failing
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
    _places: Reservations
    _outliers: OutlierDetector
    _freed: Callable[[], None]  # wakes those who wait for a place, or for a try
    _prompt: int  # tokens
    _kept: list[str] = field(init=False)
    _pair: tuple[str, str] | None = field(init=False, default=None)  # whose prompt has not begun
    tries: list[str] = field(init=False)  # what had been set aside, and is tried again by this one request

    def __attrs_post_init__(self) -> None:
        self._kept = list(self.names)
        for name in self._kept:
            self._places.keep(name, self._prompt)
        if self.prefill is not None:
            self._pair = self.prefill.load.name, self.decode.load.name
            self._places.add(*self._pair, self._prompt)
        self.tries = [name for name in {*self.names, self.name} if self._outliers.begin_probe(name, self)]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its workers."""
        both = (self.decode,) if self.prefill is None else (self.decode, self.prefill)
        return tuple(worker.load.name for worker in both)

    @property
    def name(self) -> str:
        """The name of the whole, as the worker's if there is one, or of the pair."""
        return self.decode.load.name if self.prefill is None else pair(self.prefill, self.decode)

    @property
    def overcommitted(self) -> bool:
        """Whether one of its workers has more than it can begin with."""
        return any(worker.load.overcommitted for worker in (self.decode, self.prefill) if worker is not None)

    def fits(self, request: Generate) -> bool:
        """Whether the memory of its workers has room for a request."""
        return self.decode.load.fits(request) and (self.prefill is None or self.prefill.load.fits(request))

    @asynccontextmanager
    async def ask(self, worker: Worker, request: Generate) -> AsyncIterator[Replies]:
        """Ask one of them: from then on the worker counts the request itself."""
        self._let_go(worker.load.name)
        try:
            async with worker.ask(request, request.sampling.tokens_max) as replies:
                yield replies
        finally:
            if worker is self.prefill:
                self.begun()  # in the turn in which the worker has it no more: those who wait for room look in the next

    def begun(self) -> None:
        """Note that the prompt is pending no more at the prefill, if there is one."""
        if self._pair is not None:
            self._places.discard(*self._pair, self._prompt)
            self._pair = None

    def end(self) -> None:
        """Let go of the places of those that were not asked, and let others try what this one has tried."""
        if not (self._kept or self.tries or self._pair):
            return
        self.begun()
        for name in tuple(self._kept):
            self._let_go(name)
        for name in self.tries:
            self._outliers.tried(name, self)
        self._freed()

    def _let_go(self, name: str) -> None:
        self._kept.remove(name)
        self._places.let_go(name, self._prompt)


def pair(prefill: Worker, decode: Worker) -> str:
    """Return the name of two workers whose hand-offs go from one to the other."""
    return f"{prefill.load.name}+{decode.load.name}"


@define(eq=False)
class Routing:
    """What every request of a model is routed by."""

    pool: Pool
    policy: Policy
    limits: FailoverLimits
    new_room: Callable[[], int]
    new_id: Callable[[], str]
    prefill_tokens_min: int  # a shorter prompt goes to a worker that computes both, where there is one
    ends: frozenset[int]  # the tokens by which the model ends an answer
    watch: RoutingObserver = RoutingObserver()
    ranked: Callable[[Leg], Ranking] | None = None  # of `pool`, as the policy ranks them
    outliers: OutlierDetector = field(init=False, factory=OutlierDetector)
    _places: Reservations = field(init=False, factory=Reservations)
    _order: trio.StrictFIFOLock = field(init=False, factory=trio.StrictFIFOLock)

    def choose(self, request: Generate, but: Collection[str] = ()) -> Route | None:
        """Return a route with room for a request that avoids some names; None if there is none now."""
        if (workers := self._select(request, but)) is None:
            return None
        return Route(*workers, self._places, self.outliers, self.pool.wake, len(request.tokens))

    def has_room(self) -> bool:
        """Whether there is a route now: that does not depend on the request, nor on the policy."""
        return self._select(None, ()) is not None

    def _select(self, request: Generate | None, but: Collection[str]) -> tuple[Worker, Worker | None] | None:
        """Return a worker that computes both legs, or a decode and its prefill; any that can, without a request."""
        whole = self._pick(self._first(Leg.BOTH, request, but), request)
        if whole is not None and (request is None or len(request.tokens) < self.prefill_tokens_min):
            return whole, None
        if (both := self._pair(request, but)) is not None:
            prefill, decode = both
            return decode, prefill
        return None if whole is None else (whole, None)

    def _of(self, leg: Leg) -> Ranking:
        """Return the workers of a leg that can be asked now, ranked if anything ranks them."""
        return [each for each in self.pool.workers() if each.leg is leg] if self.ranked is None else self.ranked(leg)

    def _first(self, leg: Leg, request: Generate | None, but: Collection[str]) -> list[Worker]:
        """Return workers in favour, if ranked from the least busy on, up to the first that none behind is preferred to.

        It is one with room for the request, for which no place is kept; so what a choice costs does not grow with the
        workers while one of the first will do.
        """
        if self.ranked is None or self.policy is not least_loaded:
            return list(self._in_favour(self._of(leg), but))
        found = list[Worker]()
        for worker in self._in_favour(self._of(leg), but):
            load = worker.load
            if load.full:  # as are all behind it
                break
            if leg is Leg.PREFILL and worker.bootstrap is None:
                continue
            found.append(worker)
            if (request is None or load.fits(request)) and load.name not in self._places.requests:
                break
        return found

    def choose_idle(self, request: Generate, but: Collection[str]) -> Route | None:
        """Return a route by which a request can begin at once, for slots and memory alike; None if there is none."""
        route = self.choose(request, but)
        if route is None or route.fits(request):
            return route
        route.end()
        return None

    def choose_next(self, request: Generate) -> Route | None:
        """Return a route if there is one and nobody has waited for it already."""
        return None if self._order.locked() else self.choose(request)

    async def wait_room(self) -> None:
        """Wait until there is a route for any request, behind those who wait already."""
        async with self._order:
            while not self.has_room():
                await self.pool.wait_changed()
                await trio.lowlevel.checkpoint()  # a turn later than those whose answer has begun

    async def wait_for(self, request: Generate) -> Route:
        """Wait for a route, behind those who wait already."""
        async with self._order:
            while (route := self.choose(request)) is None:
                await self.pool.wait_changed()
                await trio.lowlevel.checkpoint()  # a turn later than those whose answer has begun
            return route

    async def wait_for_other(
        self, request: Generate, lost: Collection[str], dead: Collection[str], pause_s: float
    ) -> Route:
        """Wait for a route, ahead of those who wait for a first; `lost` may be asked after a pause, `dead` not."""
        with trio.move_on_after(pause_s):
            await trio.lowlevel.checkpoint()
            while (route := self.choose(request, {*lost, *dead})) is None:
                await self.pool.wait_changed()
            return route
        while (route := self.choose(request, {*lost, *dead}) or self.choose(request, dead)) is None:
            await self.pool.wait_changed()
        return route

    def others(self, dead: Collection[str]) -> bool:
        """Whether for each leg there is a worker, or one to come, that is none of the `dead`, however busy."""
        legs = {leg for name, leg in self.pool.expected().items() if name not in dead}
        return Leg.BOTH in legs or {Leg.PREFILL, Leg.DECODE} <= legs

    # Who keeps failing -------------------------------------------------------------------

    def failed(self, name: str, error: RequestError) -> None:
        """Note that a worker, or a pair, is to blame for an error: who keeps failing is set aside for a while."""
        expected = self.pool.expected()
        self.outliers.keep(lambda each: all(part in expected for part in each.split("+")))
        names = name.split("+")
        if any(each not in expected for each in names):
            return
        legs, now, ejection = Counter(expected.values()), trio.current_time(), self.limits.ejection
        suspects = [Suspect(each, expected[each].value, legs[expected[each]]) for each in names]
        if len(suspects) == 1:
            aside = name if self.outliers.failed(suspects[0], error.code, ejection, now) else None
        else:
            both = Suspect(name, "pair", legs[Leg.PREFILL] * legs[Leg.DECODE])
            aside = self.outliers.failed_pair(both, suspects, error.code, ejection, now)
        if aside is not None:
            log.warning("a worker that keeps failing is set aside", extra={"worker": aside, "code": error.code})
            self.watch.worker_ejected(aside, error.code)

    def answered(self, name: str) -> None:
        """Note that a worker, or a pair, has done its part."""
        if self.outliers.answered(name, self.limits.ejection, trio.current_time()):
            log.info("a worker that was set aside is well again", extra={"worker": name})
            self.watch.let_in(name)

    def _in_favour(self, of_leg: Iterable[Worker], but: Collection[str]) -> Iterator[Worker]:
        """Yield the workers of a leg without some names and those that are set aside; of a leg that has no other, all.

        In their order, and one is looked at when it is asked for.
        """
        if not self.outliers:
            yield from (each for each in of_leg if each.load.name not in but)
            return
        now, others = trio.current_time(), list[Worker]()
        found = False
        for each in of_leg:
            name = each.load.name
            if name in but:
                continue
            if not self.outliers.avoided(name, now):
                found = True
                yield each
            elif not found:
                others.append(each)
        if not found:
            yield from others

    def _pair(self, request: Generate | None, but: Collection[str]) -> tuple[Worker, Worker] | None:
        """Return a prefill and a decode with room, the one also for prompts for the other; None if there is none now.

        They are not two whose hand-offs keep failing while there are others: those are worth waiting for.
        """
        prefill = self._pick(self._first(Leg.PREFILL, request, but), request)
        decode = self._pick(self._first(Leg.DECODE, request, but), request)
        if prefill is None or decode is None:
            return None
        now, decodes = trio.current_time(), len(self._of(Leg.DECODE))

        def takes(one: Load, other: Load) -> bool:
            return self._places.takes(one, other.name, decodes)

        def takes_well(one: Load, other: Load) -> bool:
            return takes(one, other) and not self.outliers.avoided(f"{one.name}+{other.name}", now)

        if takes_well(self._places.with_kept(prefill.load), decode.load):
            return prefill, decode
        if (others := self._meeting(request, but, takes_well)) is not None:
            return others
        if not self.outliers or self._is_pair_in_favour(but, now):
            return None
        return self._meeting(request, but, takes)

    def _meeting(
        self, request: Generate | None, but: Collection[str], meet: Callable[[Load, Load], bool]
    ) -> tuple[Worker, Worker] | None:
        """Return the prefill that the policy prefers of those that can meet a decode, and the decode.

        A prefill is held against as many decodes as have prompts there, and one more at the most; so what this costs
        grows with workers and requests, not with pairs.
        """
        decodes = self._with_room(Leg.DECODE, but)
        met = [
            each for each, load in self._with_room(Leg.PREFILL, but) if any(meet(load, other) for _, other in decodes)
        ]
        if (prefill := self._pick(met, request)) is None:
            return None
        load = self._places.with_kept(prefill.load)
        decode = self._pick([each for each, other in decodes if meet(load, other)], request)
        return None if decode is None else (prefill, decode)

    def _with_room(self, leg: Leg, but: Collection[str]) -> list[tuple[Worker, Load]]:
        in_favour = self._in_favour(self._of(leg), but)
        ready = [each for each in in_favour if leg is Leg.DECODE or each.bootstrap is not None]
        loads = ((each, self._places.with_kept(each.load)) for each in ready)
        return [(each, load) for each, load in loads if not load.full]

    def _is_pair_in_favour(self, but: Collection[str], now: float) -> bool:
        """Whether there are a prefill and a decode, however busy, of which nothing is set aside."""
        workers = [each for each in self.pool.workers() if each.load.name not in but]
        in_favour = [each for each in workers if not self.outliers.avoided(each.load.name, now)]
        prefills = [each for each in in_favour if each.leg is Leg.PREFILL and each.bootstrap is not None]
        decodes = [each for each in in_favour if each.leg is Leg.DECODE]
        return any(not self.outliers.avoided(pair(one, two), now) for one in prefills for two in decodes)

    def _pick(self, workers: Sequence[Worker], request: Generate | None) -> Worker | None:
        """Return which of those with room the policy prefers, or any without a request; None if all are full."""
        # Until a prefill has said where its rendezvous is, nobody can meet it there.
        ready = [each for each in workers if each.leg is not Leg.PREFILL or each.bootstrap is not None]
        loads = [(each, self._places.with_kept(each.load)) for each in ready]
        with_room = [(each, load) for each, load in loads if not load.full]
        if not with_room or request is None:
            return with_room[0][0] if with_room else None
        return with_room[self.policy(request, [load for _, load in with_room])][0]
