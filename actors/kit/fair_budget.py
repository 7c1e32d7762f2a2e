"""A budget of units that calls hold for a while, shared fairly between the owners of requests.

A call that does not fit waits, within the limits of `shares.py`. The owner that holds least goes first. A call that
waits for free units lets others pass, up to as many units as it wants itself; then all units that become free are kept
for it, outside the room of small calls. So neither many small calls nor one large call keep the others waiting for
ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import trio
from attrs import define, field, frozen

from actors.kit.fair_queue import Entry, FairQueue
from actors.kit.shares import BudgetLimits, Obstacle
from protocol.errors import Overloaded, TooLarge


@define(eq=False)
class _Waiter:
    """A call that waits for its units, or has them."""

    units: int
    small: bool
    woken: trio.Event = field(factory=trio.Event)
    has_units: bool = False
    displaced: bool = False
    overtaken_by: int = 0  # units that were given to calls behind it while it did not fit


@frozen
class BudgetStatistics:
    """The numbers of taken units and of waiting calls."""

    taken: int
    waiting: int


@define(eq=False)
class Share:
    """The units that one call holds."""

    budget: FairBudget
    owner: str
    units: int
    small: bool

    def shrink(self, units: int) -> None:
        """Give back all but so many units; no effect if it holds no more."""
        if (less := self.units - units) > 0:
            self.units = units
            self.budget.give_back(self.owner, less, small=self.small)


@define(eq=False)
class FairBudget:
    """Units within their limits; `name` names them in errors."""

    name: str
    limits: BudgetLimits
    waiting_max: float = inf
    taken: int = 0
    large: int = 0  # of them by large calls
    _queue: FairQueue[_Waiter] = field(factory=FairQueue)  # an owner's account is what it has taken

    def statistics(self) -> BudgetStatistics:
        """Return how many units are taken and how many calls wait."""
        return BudgetStatistics(self.taken, len(self._queue))

    @asynccontextmanager
    async def taking(self, units: int, owner: str, *, small: bool | None = None) -> AsyncIterator[Share]:
        """Hold units while the body runs; waits until they are free, and raises as `take`."""
        share = await self.take(units, owner, small=small)
        try:
            yield share
        finally:
            share.shrink(0)

    async def take(self, units: int, owner: str, *, small: bool | None = None) -> Share:
        """Wait for units and return them; the caller gives them back, by `Share.shrink`.

        Whether the call is `small` follows from its units, if it is not given. Raises `TooLarge` for more units than
        one owner may have, and `Overloaded` if too many calls wait and no other owner has more waiting calls than this
        one.
        """
        if self.limits.never_fits(units):
            raise TooLarge(f"one request can have {self.limits.call_max:,} of {self.name}, and this one has {units:,}")
        waiter = _Waiter(units, self.limits.is_small(units) if small is None else small)
        await trio.lowlevel.checkpoint()
        entry = self._queue.add(waiter, owner, 0)
        self._give()
        if not waiter.has_units and len(self._queue) > self.waiting_max:
            self._displace(entry)
        share = Share(self, owner, units, waiter.small)
        try:
            await waiter.woken.wait()
        except BaseException:
            if waiter.has_units:
                share.shrink(0)
            elif not waiter.displaced:
                self._queue.remove(entry)
                self._give()  # units may have been kept for it
            raise
        if waiter.displaced:
            raise Overloaded(f"as many requests wait for {self.name} as may, and this one made way for another key")
        return share

    def give_back(self, owner: str, units: int, *, small: bool) -> None:
        """Return units of an owner, which are given to the next calls in this very turn."""
        self.taken -= units
        self.large -= 0 if small else units
        self._queue.charge(owner, -units)
        self._give()

    def _displace(self, newest: Entry[_Waiter]) -> None:
        """Make room by the last call of the owner with the most; raises `Overloaded` if that is the newest."""
        last = self._queue.last_of_largest()
        assert last is not None  # the newest is in the queue
        if self._queue.waiting(newest.owner) + 1 > self._queue.waiting(last.owner):
            last = newest
        self._queue.remove(last)
        if last is newest:
            raise Overloaded(f"{len(self._queue)} requests wait for {self.name}")
        last.item.displaced = True
        last.item.woken.set()

    def _give(self) -> None:
        """Give units to all calls that may have them now, in one pass along the queue."""
        index = 0
        overtaken: list[_Waiter] = []
        while (entry := self._queue.head(index)) is not None:
            waiter, obstacle = entry.item, self._obstacle(entry)
            if obstacle is None and self._may_pass(waiter, overtaken):
                self._give_units(entry)
                for other in overtaken:
                    other.overtaken_by += waiter.units
                continue
            # A call that waits for units of its own owner is not overtaken by others.
            if obstacle is not Obstacle.OWNER:
                overtaken.append(waiter)
            index += 1

    def _obstacle(self, entry: Entry[_Waiter]) -> Obstacle | None:
        """Return the limit by which a call does not get its units now."""
        waiter, owned = entry.item, self._queue.account(entry.owner)
        return self.limits.obstacle(waiter.units, owned=owned, taken=self.taken, large=self.large, small=waiter.small)

    def _may_pass(self, waiter: _Waiter, overtaken: list[_Waiter]) -> bool:
        """Whether a call may pass the waiting ones before it.

        Once one of them has been overtaken by as many units as it wants, only small calls may, in their own room.
        """
        if not any(other.overtaken_by >= other.units for other in overtaken):
            return True
        return waiter.small and self.limits.has_small_room(waiter.units, self.taken - self.large)

    def _give_units(self, entry: Entry[_Waiter]) -> None:
        waiter = entry.item
        self._queue.remove(entry)
        self._queue.charge(entry.owner, waiter.units)
        self.taken += waiter.units
        self.large += 0 if waiter.small else waiter.units
        waiter.has_units = True
        waiter.woken.set()
