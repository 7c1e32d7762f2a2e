"""An inbox with priorities: the call of the highest priority is taken first, and of equal ones owners take turns.

A channel is first in, first out: behind the thousand requests of one client, all others would wait. Here all calls are
in one `FairQueue`, also those that wait for room: the size bounds what an actor promises to hold, and must not decide
who is next. Calls inside an engine cannot be overtaken any more, so receivers take a call only when they can begin it:
`receive` may pass a condition, and `recheck` has it evaluated again.
"""

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
class _Item(Generic[Req, Rep, Res]):
    call: Call[Req, Rep, Res]
    inside: trio.Event = field(factory=trio.Event)  # set once there is room for it, or a receiver


def _no_owner(_: object) -> str:
    return ""


def _weight_of_one(_: object) -> int:
    return 1


def _always(_: object) -> bool:
    return True


@define(eq=False)
class PriorityInbox(Generic[Req, Rep, Res]):
    """An inbox of `size` calls, at least one; further askers wait for room, first come, first served.

    A receiver takes the call of the highest `priority`, be it inside or waiting for room. Of equal ones the owners take
    turns: the next is the oldest call of the owner that has been served least, by `weight`, where one that comes anew
    counts as served as little as the least of those that wait. A call whose asker has left is dropped when it is found,
    and costs its owner no turn.
    """

    size: int
    priority: Callable[[Req], int]
    owner: Callable[[Req], str] = _no_owner
    weight: Callable[[Req], int] = _weight_of_one
    _line: FairQueue[_Item[Req, Rep, Res]] = field(factory=FairQueue)  # all calls, inside and waiting for room
    _outside: OrderedDict[int, _Item[Req, Rep, Res]] = field(factory=OrderedDict)
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def send(self, call: Call[Req, Rep, Res]) -> None:
        """Put a call in; waits while there is no room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        item, owner = _Item(call), self.owner(call.request)
        call.on_left = self.recheck  # the call behind it may fit
        self._line.catch_up(owner)
        entry = self._line.add(item, owner, self.priority(call.request))
        self._outside[entry.number] = item
        self._let_in()
        self._changed.unpark_all()  # even if it waits for room: it may be the next one all the same
        try:
            await item.inside.wait()
        finally:
            if not item.inside.is_set():
                del self._outside[entry.number]
                self._line.remove(entry)

    async def receive(self, fits: Callable[[Req], bool] = _always) -> Call[Req, Rep, Res]:
        """Wait for the next call and take it once its request fits; no other call is taken before it meanwhile.

        Which call is the next is decided again whenever one comes or leaves, and after `recheck`.
        """
        await trio.lowlevel.checkpoint()
        while True:
            while (entry := self._line.first()) is not None:
                left = entry.item.call.scope.cancel_called  # its asker knows
                if not left and not fits(entry.item.call.request):
                    break
                call = self._take(entry)
                if not left:
                    self._line.charge(entry.owner, max(1, self.weight(call.request)))
                    return call
            await self._changed.park()

    def pass_by(self, request: Req) -> bool:
        """Count a request as taken that never was inside; return False if calls wait that come first."""
        if len(self._line):
            return False
        owner = self.owner(request)
        self._line.catch_up(owner)
        self._line.charge(owner, max(1, self.weight(request)))
        return True

    def recheck(self) -> None:
        """Have the receivers evaluate again whether the next call fits."""
        self._changed.unpark_all()

    def turn_away(self, error: RequestError) -> None:
        """Fail every call, inside or waiting for room, so that its asker can ask elsewhere."""
        while (entry := self._line.first()) is not None:
            self._take(entry).answer.fail(error)

    @property
    def waiting(self) -> tuple[int, int]:
        """The numbers of calls inside, and of askers that wait for room."""
        return len(self._line) - len(self._outside), len(self._outside)

    def _take(self, entry: Entry[_Item[Req, Rep, Res]]) -> Call[Req, Rep, Res]:
        """Take a call out, and let the next asker in that waits for room."""
        self._line.remove(entry)
        self._outside.pop(entry.number, None)
        entry.item.inside.set()
        self._let_in()
        return entry.item.call

    def _let_in(self) -> None:
        while self._outside and self.waiting[0] < self.size:
            _, item = self._outside.popitem(last=False)
            item.inside.set()
            self._changed.unpark_all()


def priority_inbox(
    size: int,
    priority: Callable[[Req], int],
    owner: Callable[[Req], str] = _no_owner,
    weight: Callable[[Req], int] = _weight_of_one,
) -> tuple[Address[Req, Rep, Res], PriorityInbox[Req, Rep, Res]]:
    """Return the address and the inbox of one actor, or of several that share the inbox."""
    inbox: PriorityInbox[Req, Rep, Res] = PriorityInbox(size, priority, owner, weight)
    return Address(inbox), inbox
