"""The admission gate: whether a request may come in, and when to come back if it may not.

A request weighs what it makes engines compute at once: its generations. What the house has is shared: of those who wait
with one priority, whoever's key holds least inside goes first, so nobody waits behind another key's crowd.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

import trio
from attrs import define, field

from actors.kit.fair_queue import Entry, FairQueue
from protocol.errors import BadRequest, Draining, NotReady, Overloaded


@define(order=False, eq=False)
class _Waiter:
    """One request that waits; who leaves the line early leaves no hole in it."""

    priority: int
    owner: str
    weight: int
    at_most: float  # places that its owner may hold
    woken: trio.Event = field(factory=trio.Event)
    has_place: bool = False
    passed_by: int = 0  # generations behind it that were let in while it did not fit
    displaced: str = ""  # by what


@define(eq=False)
class AdmissionGate:
    """Admits generations up to `requests_max` at a time; a request that must wait waits `admit_s`, and then hears no.

    Of those who wait the highest priority goes first; of equals the one whose owner holds least inside, and then the
    one whose owner's turn was longest ago. One that does not fit yet lets others pass, except that what its owner is
    entitled to (an equal share of all places) is kept for the first such; once as many have passed it as it weighs,
    all that is free is kept for it. When `waiting_max` wait, one more displaces
    the last of those with a lower priority, or of the owner that has more in line; else it hears no.
    """

    requests_max: int
    admit_s: float
    waiting_max: int
    unready: Callable[[], str | None]  # why nothing can be served yet, None if it can
    draining: bool = False
    inside: int = 0  # generations
    _line: FairQueue[_Waiter] = field(factory=FairQueue)  # the accounts are what each owner holds inside
    _emptied: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._line)

    @asynccontextmanager
    async def admitted(
        self, priority: int = 0, *, owner: str = "", weight: int = 1, at_most: float = inf, param: str | None = None
    ) -> AsyncIterator[None]:
        """Hold `weight` places while the body runs; an `owner` that would hold more than `at_most` waits for its own.

        Raises `Draining`, `NotReady` or `Overloaded` at the gate, or `BadRequest`, which names `param`, for a weight
        that could never fit.
        """
        if weight > self.requests_max:
            raise BadRequest(
                f"{weight} answers are asked for at once, and this server computes {self.requests_max} (requests_max)",
                param=param,
            )
        waiter = _Waiter(priority, owner, weight, at_most)
        await self._enter(waiter)
        try:
            yield
        finally:
            self._leave(waiter)

    def change(self, requests_max: int, admit_s: float, waiting_max: int) -> None:
        """Live by other limits from now on; those who are inside or in line stay where they are."""
        self.requests_max, self.admit_s, self.waiting_max = requests_max, admit_s, waiting_max
        self._admit()

    def drain(self) -> None:
        """Admit nothing from now on; those who wait are told so."""
        self.draining = True
        for waiter in self._line:
            waiter.woken.set()

    async def wait_empty(self) -> None:
        """Wait until nobody is inside."""
        await trio.lowlevel.checkpoint()
        while self.inside:
            await self._emptied.park()

    async def _enter(self, waiter: _Waiter) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        entry = self._line.add(waiter, waiter.owner, waiter.priority)
        self._admit()  # in this very turn, so that the line is never longer than it may be
        if waiter.has_place:
            return
        if len(self._line) > self.waiting_max:
            self._displace(entry)
        await self._wait(waiter, entry)

    def _displace(self, newest: Entry[_Waiter]) -> None:
        """Make the line as long as it may be; raises `Overloaded` if it is the newest that must go.

        Of the lowest priority in line the owner that has most there loses its last, and the newest if that is no more
        than its own.
        """
        last = self._line.last_of_largest()
        assert last is not None  # the newest is in line
        most = self._line.waiting(last.owner, last.priority)
        if last.priority == newest.priority and self._line.waiting(newest.owner, newest.priority) + 1 > most:
            last = newest
        self._line.remove(last)
        if last is newest:
            raise Overloaded(f"{self.inside} requests are being served and {len(self._line)} wait")
        higher = newest.priority > last.priority
        last.item.displaced = "one with a higher priority" if higher else "one of a key with fewer in line"
        last.item.woken.set()

    async def _wait(self, waiter: _Waiter, entry: Entry[_Waiter]) -> None:
        """Wait in line until the places are given; what was given and cannot be taken goes to the next one."""
        admitted = False
        try:
            with trio.move_on_after(self.admit_s):
                await waiter.woken.wait()
            self._check()
            if waiter.displaced:
                raise Overloaded(f"as many requests wait as may, and {waiter.displaced} displaced this one")
            if not waiter.has_place:
                held, most = self._line.account(waiter.owner), waiter.at_most
                own = f" of the {most:g} that its key may have at once" if held + waiter.weight > most else ""
                raise Overloaded(f"no place{own} was free within {self.admit_s} s")
            admitted = True
        finally:
            if waiter.has_place and not admitted:
                self._leave(waiter)
            elif not (waiter.has_place or waiter.displaced):
                self._line.remove(entry)
                self._admit()  # what was kept for it is free

    def _leave(self, waiter: _Waiter) -> None:
        """Give the places to whoever is next, in this very turn, so that nobody comes between."""
        self.inside -= waiter.weight
        self._line.charge(waiter.owner, -waiter.weight)
        self._admit()
        if not self.inside:
            self._emptied.unpark_all()

    def _admit(self) -> None:
        """Give places to all that may have them now, in one look along the line."""
        place, kept = 0, 0
        passed: list[tuple[_Waiter, int]] = []  # with what was inside then
        while self.inside < self.requests_max and (entry := self._line.head(place)) is not None:
            waiter, held = entry.item, self._line.account(entry.owner)
            free = self.requests_max - self.inside
            if held and held + waiter.weight > waiter.at_most:
                place += 1  # it waits for its owner's own
                continue
            if waiter.weight <= free - kept:
                self._let_in(entry)  # its owner's next one has its place further back
                continue
            if waiter.weight <= min(waiter.passed_by, self.requests_max):
                break
            if not kept:
                kept = min(waiter.weight, int(max(0, self.requests_max // self._line.owners - held)))
            if kept >= free:
                break
            passed.append((waiter, self.inside))
            place += 1
        for waiter, inside in passed:
            waiter.passed_by += self.inside - inside

    def _let_in(self, entry: Entry[_Waiter]) -> None:
        waiter = entry.item
        self._line.remove(entry)
        self._line.charge(waiter.owner, waiter.weight)
        self.inside += waiter.weight
        waiter.has_place = True
        waiter.woken.set()

    def _check(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
        if (why := self.unready()) is not None:
            raise NotReady(why)
