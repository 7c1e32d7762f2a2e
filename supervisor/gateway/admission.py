"""Admission control: the one queue in which requests wait before anything is computed for them.

Engines compute a bounded number of generations at once, and a request that waits inside one of them takes memory there
and hides how busy it is. So requests wait here, in one fair queue, before any work is done for them. A request takes as
many places as it has generations. Places are shared fairly between owners (clients' keys): among requests of equal
priority, the owner with the fewest places goes first, so no key waits behind another key's many requests. A free place
is passed on in the same turn of the event loop, so none is ever empty while a fitting request waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from math import inf

import trio
from attrs import define, field, frozen

from actors.kit.fair_queue import Entry, FairQueue
from actors.kit.shares import BudgetLimits, Obstacle
from protocol.errors import BadRequest, Draining, NotReady, Overloaded
from protocol.messages.cluster import GateState

BEGIN_MAX = 8
"""Admitted requests that begin at once: however many clients ask, the tokens of others wait for so many of them."""


@define(order=False, eq=False)
class Waiter:
    """One request that waits for places, or has them."""

    priority: int
    owner: str
    weight: int
    limits: BudgetLimits  # of the places
    woken: trio.Event = field(factory=trio.Event)
    has_place: bool = False
    overtaken_by: int = 0  # generations behind it that were admitted while it did not fit
    displaced_by: str = ""


@frozen
class AdmissionStatistics:
    """The taken places of a gate, and its waiting requests."""

    inside: int  # generations
    waiting: int  # requests
    by_owner: Mapping[str, float]  # generations inside


@define(eq=False)
class AdmissionGate:
    """Admits `requests_max` generations at a time; a request that must wait is refused after `admit_s`.

    The order of waiting requests: highest priority first; then fewest places of the owner; then longest since the
    owner's last turn. Other requests may overtake a request that does not fit yet, with two exceptions. Its owner's
    equal share of all places is kept for the owner's first such request. Once a request has been overtaken by as many
    generations as it weighs, every free place is kept for it. When `waiting_max` requests wait, one more displaces the
    last request of a lower priority, or of an owner that has more of them waiting; otherwise it is refused itself.
    """

    requests_max: int
    admit_s: float
    waiting_max: int
    unready: Callable[[], str | None]  # why nothing can be served now, None if it can
    draining: bool = False
    inside: int = 0  # generations
    large: int = 0  # of them by large requests
    _queue: FairQueue[Waiter] = field(factory=FairQueue)  # an owner's account is what it has inside
    _emptied: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _beginning: int = 0  # requests that begin in this turn of the event loop or the next
    _turns: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)  # of admitted requests

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    def statistics(self) -> AdmissionStatistics:
        """Return how many generations are inside, in all and by owner, and how many requests wait."""
        return AdmissionStatistics(self.inside, self.waiting, self._queue.accounts())

    def state(self) -> GateState:
        """Return the state of the gate and its limits, for operators."""
        return GateState(self.inside, self.requests_max, self.waiting, self.waiting_max, self.unready() or "")

    @asynccontextmanager
    async def admitted(
        self,
        priority: int = 0,
        *,
        owner: str = "",
        weight: int = 1,
        limits: BudgetLimits | None = None,
        param: str | None = None,
    ) -> AsyncIterator[None]:
        """Hold `weight` places while the body runs, within the limits of its owner.

        Raises `Draining`, `NotReady` or `Overloaded`, or `BadRequest` with `param` for a weight that could never fit.
        """
        limits = limits or BudgetLimits(self.requests_max, inf)
        if limits.never_fits(weight):
            own = f", and {limits.call_max} of them for one key" if limits.call_max < limits.total else ""
            raise BadRequest(
                f"{weight} answers are asked for at once, and this server computes {self.requests_max}"
                f" (requests_max){own}",
                param=param,
            )
        waiter = Waiter(priority, owner, weight, limits)
        await self._enter(waiter)
        try:
            await self._wait_turn()
            yield
        finally:
            self._leave(waiter)

    def drain(self) -> None:
        """Admit nothing from now on, and refuse the requests that wait."""
        self.draining = True
        for waiter in self._queue:
            waiter.woken.set()

    async def wait_empty(self) -> None:
        """Wait until nothing is inside."""
        await trio.lowlevel.checkpoint()
        while self.inside:
            await self._emptied.park()

    async def _enter(self, waiter: Waiter) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        entry = self._queue.add(waiter, waiter.owner, waiter.priority)
        # In this turn of the event loop, so that the queue never exceeds its limit.
        self._admit()
        if waiter.has_place:
            return
        if len(self._queue) > self.waiting_max:
            self._displace(entry)
        await self._wait(waiter, entry)

    async def _wait_turn(self) -> None:
        """Wait for a turn of the event loop in which few other requests begin, in the order of admission."""
        if self._beginning >= BEGIN_MAX:
            await self._turns.park()  # whose turn is handed over
        else:
            self._beginning += 1
        try:
            await trio.lowlevel.checkpoint()
        finally:
            if not self._turns.unpark():
                self._beginning -= 1

    def _displace(self, newest: Entry[Waiter]) -> None:
        """Remove one request of a full queue; raises `Overloaded` if that is the newest.

        Of the lowest priority in the queue, the owner with the most requests loses its last one, or the newest request
        is refused if its own owner has as many.
        """
        last = self._queue.last_of_largest()
        # The newest request is in the queue.
        assert last is not None
        largest = self._queue.waiting(last.owner, last.priority)
        if last.priority == newest.priority and self._queue.waiting(newest.owner, newest.priority) + 1 > largest:
            last = newest
        self._queue.remove(last)
        if last is newest:
            raise Overloaded(f"{self.inside} requests are being served and {len(self._queue)} wait")
        higher = newest.priority > last.priority
        last.item.displaced_by = "one with a higher priority" if higher else "one of a key with fewer in line"
        last.item.woken.set()

    async def _wait(self, waiter: Waiter, entry: Entry[Waiter]) -> None:
        """Wait for the places; if they were given to a request that cannot take them, the next one gets them."""
        admitted = False
        try:
            with trio.move_on_after(self.admit_s):
                await waiter.woken.wait()
            self._check()
            if waiter.displaced_by:
                raise Overloaded(f"as many requests wait as may, and {waiter.displaced_by} displaced this one")
            if not waiter.has_place:
                own_limit = self._obstacle(waiter) is Obstacle.OWNER
                own = f" of the {waiter.limits.owner_max:g} that its key may have at once" if own_limit else ""
                raise Overloaded(f"no place{own} was free within {self.admit_s} s")
            admitted = True
        finally:
            if waiter.has_place and not admitted:
                self._leave(waiter)
            elif not (waiter.has_place or waiter.displaced_by):
                self._queue.remove(entry)
                # Places may have been kept for it.
                self._admit()

    def _leave(self, waiter: Waiter) -> None:
        """Give the places to the next requests in this very turn, so that no newer one can take them."""
        self._count(waiter, -waiter.weight)
        self._admit()
        if not self.inside:
            self._emptied.unpark_all()

    def _admit(self) -> None:
        """Give places to all requests that may have them now, in one pass along the queue."""
        position, kept, all_kept = 0, 0, False
        # Each with the number of generations inside at that time.
        overtaken: list[tuple[Waiter, int]] = []
        while self.inside < self.requests_max and (entry := self._queue.head(position)) is not None:
            waiter, taken = entry.item, self._queue.account(entry.owner)
            free, obstacle = self.requests_max - self.inside, self._obstacle(waiter)
            if obstacle is None and (self._has_small_room(waiter) or (waiter.weight <= free - kept and not all_kept)):
                # This moves its owner's next request further back.
                self._give_places(entry)
                continue
            position += 1
            if obstacle is Obstacle.OWNER or all_kept:
                # It waits for a place of its own owner, or behind one for which all places are kept.
                continue
            if waiter.weight <= min(waiter.overtaken_by, self.requests_max):
                all_kept = True
            elif not kept:
                kept = min(waiter.weight, int(max(0, self.requests_max // self._queue.owners - taken)))
            all_kept = all_kept or kept >= free
            if not all_kept:
                overtaken.append((waiter, self.inside))
            elif not waiter.limits.has_small_room(1, self.inside - self.large):
                break
        for waiter, inside in overtaken:
            waiter.overtaken_by += self.inside - inside

    def _give_places(self, entry: Entry[Waiter]) -> None:
        waiter = entry.item
        self._queue.remove(entry)
        self._count(waiter, waiter.weight)
        waiter.has_place = True
        waiter.woken.set()

    def _count(self, waiter: Waiter, places: int) -> None:
        self.inside += places
        self.large += 0 if waiter.limits.is_small(waiter.weight) else places
        self._queue.charge(waiter.owner, places)

    def _obstacle(self, waiter: Waiter) -> Obstacle | None:
        """Return the limit by which a request does not get its places now."""
        limits, owned, small = waiter.limits, self._queue.account(waiter.owner), waiter.limits.is_small(waiter.weight)
        return limits.obstacle(waiter.weight, owned=owned, taken=self.inside, large=self.large, small=small)

    def _has_small_room(self, waiter: Waiter) -> bool:
        """Whether a request gets its places from the room of small ones, which is kept for no large one."""
        limits, weight = waiter.limits, waiter.weight
        return limits.is_small(weight) and limits.has_small_room(weight, self.inside - self.large)

    def _check(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
        if (why := self.unready()) is not None:
            raise NotReady(why)
