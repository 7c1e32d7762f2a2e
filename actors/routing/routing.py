"""The choice of a worker, or of a pair, for each request of a model.

The candidates are decided here, the preference by the policy: it gets the available workers of a leg with room and
without an ejection, and returns one. So no policy can overload a worker, ask a failing one, or let a request wait while
there is room: full workers at which it may wait (`Load.may_wait`) are candidates only while no route has a free slot in
each of its legs. Room depends on the pools of a request alone (`service_levels.py`). So a router can leave requests in
its inbox, the most urgent of the same pools first, until one can be routed; and a full pool delays no request of
another.

A policy may name a worker with a free slot but too many prompts for now: it may weigh that wait against others. Not so
for a moving request, which would only wait elsewhere.

A pair is a prefill and a decode that hand over to each other. They agree on the terms of the hand-off, and both need
room, the prefill for a prompt for this decode. The two are chosen one after the other; all pairs are compared only if
those two cannot meet. A leg that agrees with no other leg is no candidate.

Everything here is decided in one turn, without a wait between the choice and the reservation. Only the `wait_` methods
wait.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product

import trio
from attrs import define, field

from actors.kit.hand_off import KindHandOff
from actors.kit.spans import Spans
from actors.routing.candidates import Choice, EligibleCandidates, Policy, hands_over
from actors.routing.load import BeginsNow, HasRoom, Load, begins, has_room
from actors.routing.outliers import OutlierDetector, Suspect
from actors.routing.pools.service_levels import ANYWHERE, Names, Reach, Scope, ServiceLevels
from actors.routing.ports import Pool, Ranking, RoutingObserver, Worker
from actors.routing.reservations import Reservations, ReservationStatistics
from actors.routing.route import Chosen, FailoverLimits, Route, pair_name
from actors.routing.slot_shares import SlotShares, keep_none
from actors.routing.waiting import WaitingLines
from protocol.errors import RequestError
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from protocol.pairing import Pairing

UNMET_S = 3.0
"""The time for which other pairs are preferred to a pair whose hand-off has failed."""

log = logging.getLogger(__name__)


@define(eq=False)
class Routing:
    """The routing of one model: its workers, its policy, and their reservations and failures."""

    pool: Pool
    policy: Policy
    limits: FailoverLimits
    new_number: Callable[[], int]  # the number of a hand-off
    new_id: Callable[[], str]
    prefill_tokens_min: int  # a shorter prompt goes to a worker that computes both legs, if there is one
    ends: frozenset[int]  # the token ids that end an answer of the model
    observer: RoutingObserver = RoutingObserver()
    ranked: Callable[[Leg], Ranking] | None = None  # the workers of a leg, as `least_loaded` prefers them
    levels: ServiceLevels = field(factory=ServiceLevels)
    ranked_among: Callable[[Leg, Names], Ranking] | None = None  # the same among some workers
    clock: Callable[[], float] = float  # the clock that times choices; the default measures none
    hand_offs: Mapping[str, KindHandOff] = field(factory=dict)  # one for each kind of engines
    kept_slots: Callable[[], int] = keep_none  # slots that one owner leaves to others
    spans: Spans = field(factory=Spans)
    outliers: OutlierDetector = field(init=False, factory=OutlierDetector)
    reservations: Reservations = field(init=False, factory=Reservations)
    shares: SlotShares = field(init=False)
    waiting: WaitingLines = field(init=False, factory=WaitingLines)  # requests that wait for another route

    def __attrs_post_init__(self) -> None:
        self.shares = SlotShares(self.kept_slots)

    def choose(self, request: Generate, excluded: Collection[str] = (), reach: Reach = Reach.MAPPED) -> Route | None:
        """Return a route with room for a request, without the workers of some names; None if there is none now."""
        began, lacking = self.clock(), self._lacking(request)
        scopes = self._scopes(request, (*excluded, *lacking), reach, lacking)
        route = self._reserve(request, self._select(request, {*excluded, *lacking} if lacking else excluded, scopes))
        if route is not None:
            self.observer.chosen(self.clock() - began)
        return route

    def choose_first(self, request: Generate) -> Route | None:
        """Return a route for a new request; None if there is none now, or if the request may not begin yet."""
        return self.choose(request) if self.may_begin(request) else None

    def _reserve(self, request: Generate, chosen: tuple[Chosen, Chosen | None] | None) -> Route | None:
        if chosen is None:
            return None
        return Route(
            *chosen,
            self.reservations,
            self.shares,
            self.outliers,
            self.pool.wake,
            len(request.tokens),
            request.owner,
        )

    def statistics(self) -> ReservationStatistics:
        """Return the reservations for requests on their way."""
        return self.reservations.statistics()

    def has_room(self, request: Generate | None = None) -> bool:
        """Whether there is a route now for every request of the same pools; without one, for one of some pools."""
        lacking = self._lacking(request)
        return self._select(None, lacking, self._scopes(request, (), Reach.MAPPED, lacking)) is not None

    def may_begin(self, request: Generate) -> bool:
        """Whether the owner of a request leaves slots enough to others if this request begins."""
        if not self.shares.kept():
            return True
        scope = self._scopes(request, (), Reach.MAPPED, self._lacking(request))[0]
        workers = chain.from_iterable(self._workers(leg, scope.get(leg)) for leg in (Leg.BOTH, Leg.DECODE))
        if not scope:
            return self.shares.allows(request.owner, workers)
        names = frozenset[str]().union(*scope.values())
        return self.shares.allows(request.owner, workers, lambda name: name in names or not self.levels.pool_of(name))

    def _select(
        self, request: Generate | None, excluded: Collection[str], scopes: Sequence[Scope]
    ) -> tuple[Chosen, Chosen | None] | None:
        """Return a worker that computes both legs, or a decode and its prefill; without a request, any with room.

        A request waits at a full worker only if no others could begin it at once.
        """
        for room in (begins, has_room):
            for scope in scopes:
                if (workers := self._select_of(request, excluded, room, scope)) is not None:
                    return workers
        return None

    def _select_of(
        self, request: Generate | None, excluded: Collection[str], has_room: HasRoom, scope: Scope
    ) -> tuple[Chosen, Chosen | None] | None:
        whole = self._pick(request, self._candidates(Leg.BOTH, excluded, has_room, scope))
        if whole is not None and (request is None or len(request.tokens) < self.prefill_tokens_min):
            return whole, None
        if (pair := self._pair(request, excluded, has_room, scope)) is not None:
            prefill, decode = pair
            return decode, prefill
        return None if whole is None else (whole, None)

    def _lacking(self, request: Generate | None) -> Collection[str]:
        """Return the workers without the adapter of a request; if no worker has it, any may refuse the request."""
        return () if request is None or request.adapter is None else self.pool.lacking(request.adapter) or ()

    def _scopes(
        self, request: Generate | None, excluded: Collection[str], reach: Reach, lacking: Collection[str] = ()
    ) -> Sequence[Scope]:
        """Return the sets of workers to choose from, the preferred one first."""
        if request is None or not self.levels.legs:
            return (ANYWHERE,)
        gone = lacking if reach is Reach.MAPPED else excluded
        orders: list[list[tuple[int, Leg, Names | None]]] = []
        for leg in self.levels.legs:
            up = (names for names in self.levels.order(leg, request) if self._is_up(leg, names, gone))
            found = list[Names | None](up if reach is Reach.FASTER else islice(up, 1)) or [None]
            orders.append([(rank, leg, names) for rank, names in enumerate(found)])
        by_rank = sorted(product(*orders), key=lambda legs: sum(rank for rank, _, _ in legs))
        return [{leg: names for _, leg, names in legs if names is not None} for legs in by_rank]

    def _is_up(self, leg: Leg, names: Names, gone: Collection[str]) -> bool:
        """Whether one of some workers is available, can meet another leg, is not ejected and not `gone`."""
        now, unpaired = trio.current_time() if self.outliers else 0.0, self.pool.pairing().unpaired
        return any(
            worker.full_name not in gone
            and worker.full_name not in unpaired
            and (leg is not Leg.PREFILL or hands_over(worker))
            and not (self.outliers and self.outliers.avoided(worker.full_name, now))
            for worker in self._workers(leg, names)
        )

    def _workers(self, leg: Leg, names: Names | None = None) -> Ranking | list[Worker]:
        """Return the available workers of a leg, all or those of some names; ranked if `_is_ranked`."""
        if names is None:
            if self.ranked is not None:
                return self.ranked(leg)
            return [worker for worker in self.pool.workers() if worker.leg is leg]
        if self.ranked_among is not None:
            return self.ranked_among(leg, names)
        return [worker for worker in self.pool.workers() if worker.leg is leg and worker.full_name in names]

    def _is_ranked(self, names: Names | None) -> bool:
        return (self.ranked if names is None else self.ranked_among) is not None

    def _candidates(
        self,
        leg: Leg,
        excluded: Collection[str],
        has_room: HasRoom,
        scope: Scope,
        accepts: Callable[[Load], bool] | None = None,
    ) -> EligibleCandidates:
        """Return the workers of a leg that a policy may choose."""
        now = trio.current_time() if self.outliers else 0.0
        names = scope.get(leg)
        return EligibleCandidates(
            self._workers(leg, names),
            ranked=self._is_ranked(names),
            has_room=has_room,
            excluded=excluded,
            avoided=(lambda name: self.outliers.avoided(name, now)) if self.outliers else None,
            with_reserved=self.reservations.with_reserved,
            accepts=accepts,
        )

    def _pick(self, request: Generate | None, candidates: EligibleCandidates) -> Chosen | None:
        """Return the candidate that the policy prefers; without a request, any. None if there is none."""
        if not candidates.workers:
            return None
        if request is None:
            load = next(iter(candidates), None)
            choice = None if load is None else Choice(load)
        else:
            choice = self.policy(request, candidates)
        return None if choice is None else Chosen(candidates.worker(choice.load), choice)

    def choose_idle(self, request: Generate, excluded: Collection[str]) -> Route | None:
        """Return a route with slots and KV memory for the request to begin at once; None if there is none."""
        lacking = self._lacking(request)
        scope, *_ = self._scopes(request, excluded, Reach.MAPPED, lacking)
        excluded = {*excluded, *lacking} if lacking else excluded
        return self._reserve(request, self._select_of(request, excluded, BeginsNow(request), scope))

    async def wait_changed(self) -> None:
        """Wait until a full worker may have room: its load has changed, or an ejection is over."""
        with trio.move_on_at(self.outliers.next_probe_at(trio.current_time())):
            await self.pool.wait_changed()

    async def wait_for(self, request: Generate) -> Route:
        """Wait for a route."""
        await trio.lowlevel.checkpoint()
        while (route := self.choose(request)) is None:
            await self.wait_changed()
            await trio.lowlevel.checkpoint()  # a turn later than requests whose answer has begun
        return route

    async def wait_for_other(
        self, request: Generate, lost: Collection[str], crashed: Collection[str], pause_s: float
    ) -> Route:
        """Wait for a further route, ahead of requests without a first one.

        The `lost` workers may be asked after a pause, the `crashed` ones never. If there are any lost and no token was
        sent, faster pools may be asked besides.
        """
        reach = Reach.FASTER if lost and not request.resumed_tokens else Reach.NEXT
        both = {*lost, *crashed}

        def choose_other(waiting: Generate) -> Route | None:
            return self.choose(waiting, both, reach)

        def choose_any(waiting: Generate) -> Route | None:
            return self.choose(waiting, both, reach) or self.choose(waiting, crashed, reach)

        key = self.levels.group(request), request.adapter, frozenset(both), reach
        with trio.move_on_after(pause_s):
            return await self.waiting.wait(key, request, choose_other, self.wait_changed)
        key_of_any = key, frozenset(crashed)
        return await self.waiting.wait(key_of_any, request, choose_any, self.wait_changed)

    def diversions(self, route: Route, request: Generate) -> list[tuple[str, str]]:
        """Return the mapped pool and the actual one for each leg of a route in another pool than mapped."""
        if not self.levels.legs:
            return []
        return self.levels.diversions(request, {worker.leg: worker.full_name for worker in route.workers})

    def has_others(self, crashed: Collection[str]) -> bool:
        """Whether each leg has, or should soon have, a worker that did not crash, however busy."""
        legs = {leg for name, leg in self.pool.expected().items() if name not in crashed}
        return Leg.BOTH in legs or {Leg.PREFILL, Leg.DECODE} <= legs

    def has_adapter(self, adapter: Adapter, lost: Collection[str]) -> bool:
        """Whether a worker has an adapter, besides the `lost` ones."""
        lacking = self.pool.lacking(adapter)
        return lacking is not None and bool(self.pool.expected().keys() - {*lacking, *lost})

    # Pairs ----------------------------------------------------------------------

    def _pair(
        self, request: Generate | None, excluded: Collection[str], has_room: HasRoom, scope: Scope
    ) -> tuple[Chosen, Chosen] | None:
        """Return a prefill and a decode that have room and can meet; None if there are none now.

        An ejected pair is not taken while another exists, even if that has no room: it is worth waiting for.
        """
        pairing = self.pool.pairing()
        if pairing.unpaired:
            excluded = {*excluded, *pairing.unpaired}
        if (prefill := self._pick(request, self._candidates(Leg.PREFILL, excluded, has_room, scope))) is None:
            return None
        name = prefill.worker.full_name
        accepts = None if pairing.is_uniform else lambda decode: pairing.agree(name, decode.name)
        decode = self._pick(request, self._candidates(Leg.DECODE, excluded, has_room, scope, accepts))
        if decode is None and pairing.is_uniform:
            return None
        now, decodes = trio.current_time(), self._sharing(scope, pairing)

        def can_meet(prefill: Load, decode: Load, *, ejected: bool = False) -> bool:
            return (
                pairing.agree(prefill.name, decode.name)
                and self.reservations.has_room(prefill, decode.name, decodes)
                and (ejected or not self.outliers.avoided(f"{prefill.name}+{decode.name}", now))
            )

        if decode is not None and can_meet(prefill.choice.load, decode.choice.load):
            return prefill, decode
        if (others := self._find_pair(request, excluded, can_meet, has_room, scope)) is not None:
            return others
        if not self.outliers or self._has_eligible_pair(excluded, now, scope, pairing):
            return None
        return self._find_pair(request, excluded, partial(can_meet, ejected=True), has_room, scope)

    def _sharing(self, scope: Scope, pairing: Pairing) -> int:
        """Return the number of decodes that share a prefill equally, from the view of a scope.

        The decodes of one pool share a prefill; several pools have equal shares of it, however many decodes each has.
        An unpaired decode has no share.
        """
        every = self._workers(Leg.DECODE)
        unpaired = sum(worker.full_name in pairing.unpaired for worker in every) if pairing.unpaired else 0
        decodes, names = len(every) - unpaired, scope.get(Leg.DECODE)
        if names is None:
            return decodes
        return min(decodes, self.levels.pools(Leg.DECODE) * len(self._workers(Leg.DECODE, names)))

    def _find_pair(
        self,
        request: Generate | None,
        excluded: Collection[str],
        meet: Callable[[Load, Load], bool],
        has_room: HasRoom,
        scope: Scope,
    ) -> tuple[Chosen, Chosen] | None:
        """Return the preferred prefill with a decode to meet, and that decode.

        A prefill is compared with the decodes that have prompts there, and one more at most; so the cost grows with
        the numbers of workers and requests, not of pairs.
        """
        decodes = list(self._candidates(Leg.DECODE, excluded, has_room, scope))
        prefills = self._candidates(
            Leg.PREFILL, excluded, has_room, scope, lambda prefill: any(meet(prefill, decode) for decode in decodes)
        )
        if (prefill := self._pick(request, prefills)) is None:
            return None
        load = prefill.choice.load
        meeting = self._candidates(Leg.DECODE, excluded, has_room, scope, lambda decode: meet(load, decode))
        decode = self._pick(request, meeting)
        return None if decode is None else (prefill, decode)

    def _has_eligible_pair(self, excluded: Collection[str], now: float, scope: Scope, pairing: Pairing) -> bool:
        """Whether a prefill and a decode can meet that are not ejected, nor as a pair, however busy."""
        legs = [self._workers(leg, scope.get(leg)) for leg in (Leg.PREFILL, Leg.DECODE)]
        workers = [worker for leg in legs for worker in leg if worker.full_name not in excluded]
        eligible = [worker for worker in workers if not self.outliers.avoided(worker.full_name, now)]
        prefills = [worker for worker in eligible if worker.leg is Leg.PREFILL and hands_over(worker)]
        decodes = [worker for worker in eligible if worker.leg is Leg.DECODE]
        return any(
            pairing.agree(prefill.full_name, decode.full_name)
            and not self.outliers.avoided(pair_name(prefill, decode), now)
            for prefill, decode in product(prefills, decodes)
        )

    # Ejection -------------------------------------------------------------------

    def failed(self, name: str, error: RequestError) -> None:
        """Count an error against a worker or a pair, and eject it for a while if it keeps failing."""
        expected = self.pool.expected()
        self.outliers.retain(lambda tracked: all(part in expected for part in tracked.split("+")))
        names = name.split("+")
        if any(part not in expected for part in names):
            return
        legs, now, ejection = Counter(expected.values()), trio.current_time(), self.limits.ejection
        suspects = [Suspect(part, expected[part].value, legs[expected[part]]) for part in names]
        if len(suspects) == 1:
            ejected = name if self.outliers.failed(suspects[0], error.code, ejection, now) else None
        else:
            self.outliers.avoid(name, now + UNMET_S, now)  # or the next one, least loaded, would fail in the same way
            both = Suspect(name, "pair", legs[Leg.PREFILL] * legs[Leg.DECODE])
            ejected = self.outliers.failed_pair(both, suspects, error.code, ejection, now)
        if ejected is not None:
            log.warning("a worker that keeps failing is ejected", extra={"worker": ejected, "code": error.code})
            self.observer.worker_ejected(ejected, error.code)

    def answered(self, name: str) -> None:
        """Count a success for a worker or a pair."""
        if self.outliers.answered(name, self.limits.ejection, trio.current_time()):
            log.info("an ejected worker is readmitted", extra={"worker": name})
            self.observer.readmitted(name)
