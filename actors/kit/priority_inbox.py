"""An inbox that owners of requests share fairly: the most urgent call is first, and equals take turns by owner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

import trio
from attrs import define, field

from actors.kit.calls import Address, Call, Rep, Req, Res
from actors.kit.fair_queue import Entry, FairQueue
from protocol.errors import RequestError


@define(eq=False)
class _Waiting(Generic[Req, Rep, Res]):
    call: Call[Req, Rep, Res]
    inside: trio.Event = field(factory=trio.Event)  # there was room for it, or a receiver


def _of_nobody(_: object) -> str:
    return ""


def _one(_: object) -> int:
    return 1


def _always(_: object) -> bool:
    return True


@define(eq=False)
class PriorityInbox(Generic[Req, Rep, Res]):
    """Lets `size` calls wait, at least one; whoever asks beyond that waits for room, first come, first served.

    A receiver takes the call of the highest `urgency`, even of those who wait for room. Of equal ones the owners take
    turns by `weight`: the next is the oldest call of the owner that has been given least while anything waited. A call
    whose asker has left is nobody's turn.
    """

    size: int
    urgency: Callable[[Req], int]
    owner: Callable[[Req], str] = _of_nobody
    weight: Callable[[Req], int] = _one
    _line: FairQueue[_Waiting[Req, Rep, Res]] = field(factory=FairQueue)  # all that wait, inside and for room
    _outside: OrderedDict[int, _Waiting[Req, Rep, Res]] = field(factory=OrderedDict)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def send(self, call: Call[Req, Rep, Res]) -> None:
        """Put a call in, waiting while there is no room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waiting, owner = _Waiting(call), self.owner(call.request)
        call.when_left = self.retry  # whoever is behind it may fit
        self._line.catch_up(owner)
        entry = self._line.add(waiting, owner, self.urgency(call.request))
        self._outside[entry.number] = waiting
        self._move()
        self._news.unpark_all()  # also if it waits for room: it may be the next one all the same
        try:
            await waiting.inside.wait()
        finally:
            if not waiting.inside.is_set():
                del self._outside[entry.number]
                self._line.remove(entry)

    async def receive(self, fits: Callable[[Req], bool] = _always) -> Call[Req, Rep, Res]:
        """Wait for the next call, and take it once its request fits: it is not passed by others that would.

        Who is next is judged anew whenever somebody comes or leaves, and after `retry`.
        """
        await trio.lowlevel.checkpoint()
        while True:
            while (entry := self._line.first()) is not None:
                left = entry.item.call.scope.cancel_called  # by an asker who has been told so
                if not left and not fits(entry.item.call.request):
                    break
                call = self._take(entry)
                if not left:
                    self._line.charge(entry.owner, max(1, self.weight(call.request)))
                    return call
            await self._news.park()

    def retry(self) -> None:
        """Let those who receive look again whether the next call fits."""
        self._news.unpark_all()

    def turn_away(self, error: RequestError) -> None:
        """Fail every call that waits, inside and for room; they can be asked elsewhere."""
        while (entry := self._line.first()) is not None:
            self._take(entry).answer.fail(error)

    @property
    def waiting(self) -> tuple[int, int]:
        """How many calls wait inside, and how many askers for room."""
        return len(self._line) - len(self._outside), len(self._outside)

    def _take(self, entry: Entry[_Waiting[Req, Rep, Res]]) -> Call[Req, Rep, Res]:
        """Take a call out of the line, and let the next one that waits for room in."""
        self._line.remove(entry)
        self._outside.pop(entry.number, None)
        entry.item.inside.set()
        self._move()
        return entry.item.call

    def _move(self) -> None:
        while self._outside and self.waiting[0] < self.size:
            _, waiting = self._outside.popitem(last=False)
            waiting.inside.set()
            self._news.unpark_all()


def priority_inbox(
    size: int,
    urgency: Callable[[Req], int],
    owner: Callable[[Req], str] = _of_nobody,
    weight: Callable[[Req], int] = _one,
) -> tuple[Address[Req, Rep, Res], PriorityInbox[Req, Rep, Res]]:
    """Return the address and the inbox of an actor, or of several, that let `size` calls wait in fair order."""
    made: PriorityInbox[Req, Rep, Res] = PriorityInbox(size, urgency, owner, weight)
    return Address(made), made
