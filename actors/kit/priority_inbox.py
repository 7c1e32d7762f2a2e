"""An inbox with priorities: the call of the highest priority is taken first, and of equal ones owners take turns.

A channel is first in, first out: behind the thousand requests of one client, all others would wait. Here all calls are
in one `FairQueue`, also the calls that wait for room: the size bounds how much an actor holds, and must not decide who
is next. Calls inside an engine cannot be overtaken any more, so receivers take a call only when they can begin it:
`receive` may pass a condition, and `recheck` has it evaluated again.

Calls may be of several groups that wait for different things: then each group has a line of its own, and the head of
one that does not fit holds up no other. One size bounds the calls of all groups together. A receiver of one group is
woken by that group alone: with as many receivers as groups, each call would be looked at by all otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Generic

import trio
from attrs import define, field

from actors.kit.calls import Address, Call, Rep, Req, Res
from actors.kit.fair_queue import Entry, FairQueue
from protocol.errors import RequestError


@define(eq=False)
class _Item(Generic[Req, Rep, Res]):
    call: Call[Req, Rep, Res]
    line: FairQueue[_Item[Req, Rep, Res]]
    inside: trio.Event = field(factory=trio.Event)  # set once there is room for it, or a receiver


def _no_owner(_: object) -> str:
    return ""


def _weight_of_one(_: object) -> int:
    return 1


def _no_group(_: object) -> Hashable:
    return ()


def _always(_: object) -> bool:
    return True


@define(eq=False)
class PriorityInbox(Generic[Req, Rep, Res]):
    """An inbox of `size` calls, at least one; further askers wait for room, first come, first served.

    A receiver takes the call of the highest `priority`, inside or waiting for room. Among equals a virtual token
    counter decides: the oldest call of the owner with the least served `weight` is next, and a returning owner starts
    at the minimum of the waiting owners. A call whose asker leaves is taken out at once, and costs its owner no turn.
    Owners take turns in each `group` by itself; among the groups' next calls that fit, the highest priority is taken,
    then the oldest.
    """

    size: int
    priority: Callable[[Req], int]
    owner: Callable[[Req], str] = _no_owner
    weight: Callable[[Req], int] = _weight_of_one
    group: Callable[[Req], Hashable] = _no_group
    _lines: dict[Hashable, FairQueue[_Item[Req, Rep, Res]]] = field(factory=dict)  # all calls, by group
    _outside: OrderedDict[int, _Item[Req, Rep, Res]] = field(factory=OrderedDict)
    _changed: dict[Hashable | None, trio.lowlevel.ParkingLot] = field(factory=dict)  # by group; None: receivers of all
    _numbers: Iterator[int] = field(factory=count)  # the order of arrival

    async def send(self, call: Call[Req, Rep, Res]) -> None:
        """Put a call in; waits while there is no room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        group, owner = self.group(call.request), self.owner(call.request)
        line = self._line_of(group)
        item = _Item(call, line)
        line.catch_up(owner)
        entry = line.add(item, owner, self.priority(call.request))
        call.on_left = partial(self._remove, entry, group)
        self._outside[entry.number] = item
        self._let_in()
        self.recheck(group)  # even if it waits for room: it may be the next one all the same
        try:
            await item.inside.wait()
        finally:
            if not item.inside.is_set():
                self._remove(entry, group)

    async def receive(
        self,
        fits: Callable[[Req], bool] = _always,
        group: Hashable | None = None,
        may_begin: Callable[[Req], bool] = _always,
    ) -> Call[Req, Rep, Res]:
        """Wait for the next call and take it once its request fits; no other of its group is taken before it meanwhile.

        But calls of other owners pass a call that may not begin. Which call is the next is decided again whenever one
        comes or leaves, and after `recheck`. With a `group`, which may not be None, calls of others are left alone.
        """
        await trio.lowlevel.checkpoint()
        while True:  # noqa: ASYNC913  # a turn without a wait takes a call out
            for entry in self._heads(group, may_begin):
                if fits(entry.item.call.request):
                    call = self._take(entry)
                    entry.item.line.charge(entry.owner, max(1, self.weight(call.request)))
                    return call
            await self._changed.setdefault(group, trio.lowlevel.ParkingLot()).park()

    def pass_by(self, request: Req) -> bool:
        """Count a request that never was inside as taken; return False if calls of its group wait and come first."""
        line = self._line_of(self.group(request))
        if len(line):
            return False
        owner = self.owner(request)
        line.catch_up(owner)
        line.charge(owner, max(1, self.weight(request)))
        return True

    def recheck(self, group: Hashable | None = None) -> None:
        """Have the receivers evaluate again whether the next call fits, of a group or of all."""
        for waited_for in tuple(self._changed) if group is None else (group, None):
            if (changed := self._changed.get(waited_for)) is not None:
                changed.unpark_all()

    def turn_away(self, error: RequestError) -> None:
        """Fail every call, inside or waiting for room, so that its asker can ask elsewhere."""
        while heads := self._heads():
            for entry in heads:
                self._take(entry).answer.fail(error)

    @property
    def waiting(self) -> tuple[int, int]:
        """The numbers of calls inside, and of askers that wait for room."""
        return sum(map(len, self._lines.values())) - len(self._outside), len(self._outside)

    def waiting_by_group(self) -> Mapping[Hashable, int]:
        """Return the number of calls of each group, inside or waiting for room."""
        return {group: len(line) for group, line in self._lines.items() if len(line)}

    def _line_of(self, group: Hashable) -> FairQueue[_Item[Req, Rep, Res]]:
        if (line := self._lines.get(group)) is None:
            line = self._lines[group] = FairQueue(numbers=self._numbers)
        return line

    def _heads(
        self, group: Hashable | None = None, may_begin: Callable[[Req], bool] = _always
    ) -> list[Entry[_Item[Req, Rep, Res]]]:
        """Return the next call of each group, or of one, in the order in which they may be taken."""

        def first(line: FairQueue[_Item[Req, Rep, Res]]) -> Entry[_Item[Req, Rep, Res]] | None:
            return next((head for head in line.heads() if may_begin(head.item.call.request)), None)

        if group is not None:
            only = self._lines.get(group)
            return [] if only is None or (head := first(only)) is None else [head]
        heads = [head for line in self._lines.values() if (head := first(line)) is not None]
        return sorted(heads, key=lambda entry: (-entry.priority, entry.number)) if heads[1:] else heads

    def _take(self, entry: Entry[_Item[Req, Rep, Res]]) -> Call[Req, Rep, Res]:
        """Take a call out, and let the next asker in that waits for room."""
        entry.item.line.remove(entry)
        self._outside.pop(entry.number, None)
        entry.item.inside.set()
        entry.item.call.on_left = None
        self._let_in()
        return entry.item.call

    def _remove(self, entry: Entry[_Item[Req, Rep, Res]], group: Hashable) -> None:
        """Take a call out whose asker has left; the one behind it may fit."""
        self._take(entry)
        self.recheck(group)

    def _let_in(self) -> None:
        while self._outside and self.waiting[0] < self.size:
            _, item = self._outside.popitem(last=False)
            item.inside.set()


def priority_inbox(
    size: int,
    priority: Callable[[Req], int],
    owner: Callable[[Req], str] = _no_owner,
    weight: Callable[[Req], int] = _weight_of_one,
    group: Callable[[Req], Hashable] = _no_group,
) -> tuple[Address[Req, Rep, Res], PriorityInbox[Req, Rep, Res]]:
    """Return the address and the inbox of one actor, or of several that share the inbox."""
    inbox: PriorityInbox[Req, Rep, Res] = PriorityInbox(size, priority, owner, weight, group)
    return Address(inbox), inbox
