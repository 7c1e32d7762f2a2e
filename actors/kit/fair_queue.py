"""A queue in which owners take turns.

First come, first served is unfair between clients: one that sends a thousand requests at once makes all others wait
behind all of them. Here each owner (a client's key) has an *account*: the units that it has had so far or holds now,
charged by the user of the queue. Among items of the highest priority, the owner with the smallest account goes first;
of equal accounts, the one whose turn was longest ago. The items of one owner keep the order in which they came. So an
owner waits behind at most one item of each other owner with no larger account, however many items that owner has, and
however often its account is empty again.

Nothing here waits or reads a clock. Each operation takes time logarithmic in the number of owners with items, and moves
some bytes of an array.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

from attrs import define, field, frozen

T = TypeVar("T")


@frozen(eq=False)
class Entry(Generic[T]):
    """One item in the queue, with everything that decides its place but its owner's account."""

    item: T
    owner: str
    priority: int
    number: int  # the order of arrival


@define(eq=False)
class _Owner(Generic[T]):
    lanes: dict[int, OrderedDict[int, Entry[T]]] = field(factory=dict)  # entries by priority, in order of arrival
    waiting: int = 0
    turn: int = 0  # the number of its first arrival, or of its last charge if that is later


@define(eq=False)
class FairQueue(Generic[T]):
    """Items ordered by priority, then by their owner's account, then by its last turn."""

    _owners: dict[str, _Owner[T]] = field(factory=dict)  # only owners with items
    _accounts: dict[str, float] = field(factory=dict)  # only accounts other than 0
    # The lanes in the order of turns: priority (negative), account, turn, owner.
    _heads: list[tuple[int, float, int, str]] = field(factory=list)
    _least: list[tuple[float, str]] = field(factory=list)  # the accounts of the owners with items, in order
    _numbers: Iterator[int] = field(factory=count)
    _size: int = 0
    _away: int = 0  # owners with an account and no items

    def __len__(self) -> int:
        """Return the number of items."""
        return self._size

    def __iter__(self) -> Iterator[T]:
        """Yield every item, in no particular order."""
        for owner in self._owners.values():
            for lane in owner.lanes.values():
                yield from (entry.item for entry in lane.values())

    def add(self, item: T, owner: str, priority: int) -> Entry[T]:
        """Add an item; the entry that is returned removes it again."""
        entry = Entry(item, owner, priority, next(self._numbers))
        if (record := self._owners.get(owner)) is None:
            record = self._owners[owner] = _Owner(turn=entry.number)
            self._away -= owner in self._accounts
            insort(self._least, (self.account(owner), owner))
        if (lane := record.lanes.get(priority)) is None:
            lane = record.lanes[priority] = OrderedDict()
            insort(self._heads, (-priority, self.account(owner), record.turn, owner))
        lane[entry.number] = entry
        record.waiting += 1
        self._size += 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Remove an entry, wherever it stands; raises `KeyError` if it is not in the queue."""
        record = self._owners[entry.owner]
        lane = record.lanes[entry.priority]
        del lane[entry.number]
        record.waiting -= 1
        self._size -= 1
        account = self.account(entry.owner)
        if not lane:
            self._drop_head(entry.priority, account, record.turn, entry.owner)
            del record.lanes[entry.priority]
        if not record.waiting:
            del self._least[bisect_left(self._least, (account, entry.owner))]
            del self._owners[entry.owner]
            self._away += entry.owner in self._accounts

    def first(self) -> Entry[T] | None:
        """Return the entry whose turn it is, None if the queue is empty."""
        return self.head(0)

    def heads(self) -> Iterator[Entry[T]]:
        """Yield the first entry of each owner at each priority, in the order of their turns."""
        index = 0
        while (entry := self.head(index)) is not None:
            yield entry
            index += 1

    def head(self, index: int) -> Entry[T] | None:
        """Return the first entry of the owner and priority at an index in the order of turns, None behind the last."""
        if index >= len(self._heads):
            return None
        priority, _, _, owner = self._heads[index]
        return next(iter(self._owners[owner].lanes[-priority].values()))

    def last_of_largest(self) -> Entry[T] | None:
        """Return the last entry of the owner with the most items, at the lowest priority that any item has."""
        if not self._heads:
            return None
        lowest = self._heads[-1][0]
        lanes = (self._owners[owner].lanes[-lowest] for priority, _, _, owner in self._heads if priority == lowest)
        return next(reversed(max(lanes, key=len).values()))

    def waiting(self, owner: str, priority: int | None = None) -> int:
        """Return the number of an owner's items, in all or at one priority."""
        if (record := self._owners.get(owner)) is None:
            return 0
        return record.waiting if priority is None else len(record.lanes.get(priority, ()))

    @property
    def owners(self) -> int:
        """The number of owners with items, or with an account other than 0."""
        return len(self._owners) + self._away

    # Accounts ----------------------------------------------------------------------------

    def accounts(self) -> dict[str, float]:
        """Return the accounts other than 0, by owner."""
        return dict(self._accounts)

    def account(self, owner: str) -> float:
        """Return the account of an owner."""
        return self._accounts.get(owner, 0)

    def charge(self, owner: str, amount: float) -> None:
        """Add `amount`, which may be negative, to an owner's account; its place in the queue changes at once.

        A positive amount is a turn: of owners with equal accounts it is the last from then on.
        """
        before, after = self.account(owner), self.account(owner) + amount
        if after:
            self._accounts[owner] = after
        else:
            self._accounts.pop(owner, None)
        if (record := self._owners.get(owner)) is None:
            self._away += (after != 0) - (before != 0)
            return
        del self._least[bisect_left(self._least, (before, owner))]
        insort(self._least, (after, owner))
        turn = next(self._numbers) if amount > 0 else record.turn
        for priority in record.lanes:
            self._drop_head(priority, before, record.turn, owner)
            insort(self._heads, (-priority, after, turn, owner))
        record.turn = turn

    def catch_up(self, owner: str) -> None:
        """Raise the account of an owner without items to the least of those with items: absence saves nothing."""
        if not self._owners:
            self._accounts.clear()  # accounts decide nothing while there are no items
            self._away = 0
        elif owner not in self._owners and self._least[0][0] > self.account(owner):
            self.charge(owner, self._least[0][0] - self.account(owner))

    def _drop_head(self, priority: int, account: float, turn: int, owner: str) -> None:
        del self._heads[bisect_left(self._heads, (-priority, account, turn, owner))]
